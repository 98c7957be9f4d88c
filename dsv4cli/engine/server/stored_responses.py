"""Routes of stored responses: read, list their input, cancel and delete."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dsv4cli.engine.server.incoming import account_of, service_of
from dsv4cli.engine.server.refusals import Refusal, bad_field, json_response
from dsv4cli.engine.server.response_input import listed
from dsv4cli.engine.server.response_store import ResponseStore

# input items per page: default and most
USUAL_PAGE, MOST_PAGE = 20, 100


async def stored_response(http: HttpRequest) -> Response:
    """GET and DELETE /v1/responses/ID."""
    store, name = _store(http), http.path_params["id"]
    if http.query_params.get("stream", "").lower() == "true":
        raise bad_field("stream", "stored responses are not streamed: read it without stream")
    document = store.document(name, account_of(http))
    if http.method == "DELETE":
        store.cancel(name)
        store.remove(name)
        return json_response({"id": name, "object": "response", "deleted": True})
    return json_response(document)


async def cancel_response(http: HttpRequest) -> Response:
    """POST /v1/responses/ID/cancel."""
    store, name = _store(http), http.path_params["id"]
    if not store.document(name, account_of(http))["background"]:
        raise bad_field("response_id", "only a response with background: true can be cancelled; to end another one, "
                        "close its connection")  # fmt: skip
    await store.cancelled(name)
    return json_response(store.document(name, account_of(http)))


async def response_inputs(http: HttpRequest) -> Response:
    """GET /v1/responses/ID/input_items: the items of a response's own input, in pages, newest first by default."""
    store, query = _store(http), http.query_params
    items = [listed(item) for item in store.inputs(http.path_params["id"], account_of(http))]
    if query.get("order", "desc") == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if (after := query.get("after")) is not None:
        if after not in names:
            raise bad_field("after", f"the response has no input item {after!r}")
        items = items[names.index(after) + 1 :]
    limit = query.get("limit", str(USUAL_PAGE))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= MOST_PAGE:
        raise bad_field("limit", f"expected a whole number from 1 to {MOST_PAGE}")
    return json_response(_page(items[: int(limit)], has_more=len(items) > int(limit)))


def _page(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": items, "has_more": has_more, **ends}


def _store(http: HttpRequest) -> ResponseStore:
    store = service_of(http).responses
    if store is None:
        raise Refusal(400, "this server stores no responses (--no-store)")
    return store
