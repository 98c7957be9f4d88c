"""Texts and conversations as token ids, and back: /tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.server.chat_request import conversation_ids
from dsv4cli.engine.server.completion_request import check_ids
from dsv4cli.engine.server.efforts import effort_of
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.incoming import body_of, service_of
from dsv4cli.engine.server.refusals import bad_field, json_response
from dsv4cli.engine.text import tokens

IDLE_FIELDS = ("model", "add_generation_prompt", "continue_final_message", "tools", "messages")


async def tokenize(http: HttpRequest) -> Response:
    """POST /tokenize: `prompt`, a raw text, or `messages`, as the chat API has them."""
    service, fields = service_of(http), Fields(await body_of(http))
    tokenizer, prompt = service.dialogue.tokenizer, fields.text("prompt")
    strings = fields.flag("return_token_strs")
    effort = effort_of(fields, service.dialogue.release, service.usual.think)
    if prompt is None:
        ids = conversation_ids(fields, effort, service)
    else:
        ids = tokenizer.encode((tokens.BOS if fields.flag("add_special_tokens") else "") + prompt)
    shown = [tokenizer.decode([id_]) for id_ in ids] if strings else None
    fields.ignored(*IDLE_FIELDS)
    service.say_ignored(fields.unknown)
    return json_response({"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": shown})


async def detokenize(http: HttpRequest) -> Response:
    """POST /detokenize: `tokens`, token ids, special ones included."""
    service, fields = service_of(http), Fields(await body_of(http))
    given = fields.items("tokens")
    if given is None or not all(type(one) is int for one in given):
        raise bad_field("tokens", "expected a list of token ids")
    return json_response({"prompt": service.dialogue.tokenizer.decode(check_ids(given, "tokens", service))})


async def tokenizer_info(http: HttpRequest) -> Response:
    """GET /tokenizer_info."""
    service = service_of(http)
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens.BOS,
            "eos_token": tokens.EOS,
            "pad_token": tokens.PAD,
            "add_bos_token": False,
            "vocab_size": service.dialogue.config.vocab_size,
            "model_max_length": service.context,
        }
    )
