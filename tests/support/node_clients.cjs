// Clients of Node, as they are: `node node_clients.cjs CLIENT CAPABILITY URL KEY QUESTION` prints a JSON value.

globalThis.AI_SDK_LOG_WARNINGS = false;
const [client, capability, url, apiKey, question] = process.argv.slice(2);
const PARAMETERS = {
  type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false,
};
const SCHEMA = {
  type: 'object', properties: { total: { type: 'integer' } }, required: ['total'], additionalProperties: false,
};
const FUNCTION = { name: 'get_weather', description: 'Get the weather in a city.', parameters: PARAMETERS };
const messages = [{ role: 'user', content: question }];
const weather = ({ city }) => `21 in ${city}`;

async function collect(parts, take) {
  const found = [];
  for await (const part of parts) {
    const text = take(part);
    if (text) found.push(text);
  }
  return found.join('');
}

function openai() {
  const OpenAI = require('openai');
  return new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
}

function chat() {
  const create = options => openai().chat.completions.create({ model: 'nano', messages, ...options });
  const tools = [{ type: 'function', function: FUNCTION }];
  return {
    stream: async () => collect(await create({ stream: true }), chunk => chunk.choices[0]?.delta.content),
    tools: async () => {
      const { message } = (await create({ tools })).choices[0];
      const [call] = message.tool_calls;
      const content = weather(JSON.parse(call.function.arguments));
      const result = { role: 'tool', tool_call_id: call.id, content };
      return (await create({ tools, messages: [...messages, message, result] })).choices[0].message.content;
    },
    parse: async () => {
      const format = { type: 'json_schema', json_schema: { name: 'sum', strict: true, schema: SCHEMA } };
      const options = { model: 'nano', messages, response_format: format };
      return JSON.parse((await openai().chat.completions.parse(options)).choices[0].message.content).total;
    },
    reason: async () => (await create({ reasoning_effort: 'high' })).choices[0].message.reasoning_content,
  };
}

function responses() {
  const create = options => openai().responses.create({ model: 'nano', input: question, ...options });
  const tools = [{ type: 'function', strict: true, ...FUNCTION }];
  return {
    stream: async () => collect(await create({ stream: true }),
      event => event.type === 'response.output_text.delta' && event.delta),
    tools: async () => {
      const first = await create({ tools });
      const [call] = first.output;
      const output = weather(JSON.parse(call.arguments));
      const input = [{ type: 'function_call_output', call_id: call.call_id, output }];
      return (await create({ tools, input, previous_response_id: first.id })).output_text;
    },
    parse: async () => {
      const format = { type: 'json_schema', name: 'sum', strict: true, schema: SCHEMA };
      return JSON.parse((await create({ text: { format } })).output_text).total;
    },
    reason: async () => (await create({ reasoning: { effort: 'high' } })).output[0].content[0].text,
  };
}

function anthropic() {
  const Anthropic = require('@anthropic-ai/sdk');
  const own = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const fields = { model: 'nano', max_tokens: 2000, messages };
  const tools = [{ name: FUNCTION.name, description: FUNCTION.description, input_schema: PARAMETERS }];
  return {
    stream: () => collect(own.messages.stream(fields), event => event.delta?.text),
    tools: async () => {
      const { content } = await own.messages.create({ ...fields, tools });
      const call = content.at(-1);
      const result = { type: 'tool_result', tool_use_id: call.id, content: weather(call.input) };
      const turns = [...messages, { role: 'assistant', content }, { role: 'user', content: [result] }];
      return (await own.messages.create({ ...fields, tools, messages: turns })).content[0].text;
    },
    parse: async () => {
      const format = { type: 'json_schema', schema: SCHEMA };
      return JSON.parse((await own.messages.create({ ...fields, output_config: { format } })).content[0].text).total;
    },
    reason: async () => {
      const thinking = { type: 'enabled', budget_tokens: 1024 };
      return (await own.messages.create({ ...fields, thinking })).content[0].thinking;
    },
  };
}

function aiSdk(model, providerOptions) {
  const { generateText, streamText, Output, jsonSchema, stepCountIs, tool } = require('ai');
  const tools = {
    get_weather: tool({ description: FUNCTION.description, inputSchema: jsonSchema(PARAMETERS), execute: weather }),
  };
  const request = { model, prompt: question, maxRetries: 0 };
  return {
    stream: () => collect(streamText(request).textStream, part => part),
    tools: async () => {
      const options = { ...request, tools, stopWhen: stepCountIs(3) };
      const streamed = await collect(streamText(options).textStream, part => part);
      const { text } = await generateText(options);
      if (streamed !== text) throw new Error(`streamed ${streamed}, generated ${text}`);
      return text;
    },
    parse: async () => {
      const output = Output.object({ schema: jsonSchema(SCHEMA) });
      return (await generateText({ ...request, output })).output.total;
    },
    reason: async () => (await generateText({ ...request, providerOptions })).reasoningText,
  };
}

const CLIENTS = {
  'openai-chat': chat,
  'openai-responses': responses,
  anthropic,
  'ai-sdk-responses': () => aiSdk(
    require('@ai-sdk/openai').createOpenAI({ baseURL: `${url}/v1`, apiKey })('nano'),
    { openai: { reasoningEffort: 'high', reasoningSummary: 'auto', forceReasoning: true } },
  ),
  'ai-sdk-compatible': () => aiSdk(
    require('@ai-sdk/openai-compatible')
      .createOpenAICompatible({ name: 'own', baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true })('nano'),
    { own: { reasoningEffort: 'high' } },
  ),
  'ai-sdk-anthropic': () => aiSdk(
    require('@ai-sdk/anthropic').createAnthropic({ baseURL: `${url}/v1`, apiKey })('nano'),
    { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } } },
  ),
};

CLIENTS[client]()[capability]().then(value => console.log(JSON.stringify(value)));
