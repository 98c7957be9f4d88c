"""Tokenization over HTTP: /tokenize, /detokenize and /tokenizer_info, compatible with vLLM."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.server.chat_request import conversation_ids
from dsv4cli.engine.server.completion_request import check_ids
from dsv4cli.engine.server.efforts import effort_of
from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.incoming import read_body, service_of
from dsv4cli.engine.server.refusals import bad_field, json_response
from dsv4cli.engine.server.service import Service
from dsv4cli.engine.text import tokens

IDLE_FIELDS = ("model", "add_generation_prompt", "continue_final_message", "tools", "messages")


async def tokenize(http: HttpRequest) -> Response:
    """POST /tokenize: the token ids of `prompt`, a raw text, or of `messages`, as in the chat API."""
    return json_response(await read_body(http, _tokenized))


def _tokenized(body: dict[str, Any], service: Service) -> dict[str, Any]:
    fields, tokenizer = Fields(body), service.dialogue.tokenizer
    prompt, strings = fields.text("prompt"), fields.flag("return_token_strs")
    effort = effort_of(fields, service.dialogue.release, service.defaults.think)
    if prompt is None:
        ids = conversation_ids(fields, effort, service)
    else:
        ids = service.encode((tokens.BOS if fields.flag("add_special_tokens") else "") + prompt)
    fields.ignored(*IDLE_FIELDS)
    service.say_ignored(fields.unknown)
    shown = [tokenizer.decode([id_]) for id_ in ids] if strings else None
    return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": shown}


async def detokenize(http: HttpRequest) -> Response:
    """POST /detokenize: the text of `tokens`, including special tokens."""
    return json_response(await read_body(http, _detokenized))


def _detokenized(body: dict[str, Any], service: Service) -> dict[str, Any]:
    given = Fields(body).items("tokens")
    if given is None or not all(type(one) is int for one in given):
        raise bad_field("tokens", "expected a list of token ids")
    return {"prompt": service.dialogue.tokenizer.decode(check_ids(given, "tokens", service))}


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
