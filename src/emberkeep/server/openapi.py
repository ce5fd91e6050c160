"""The OpenAPI document. Bodies are read by us, not by FastAPI, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from emberkeep.library.checking import Body
from emberkeep.server.wire.chat import ChatBody
from emberkeep.server.wire.completions import CompletionBody
from emberkeep.server.wire.native import DetokenizeBody, TemplateBody, TokenizeBody

_WHERE = "#/components/schemas/{model}"
_BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, TemplateBody)


def takes(model: type[Body]) -> dict[str, Any]:
    schema = {"$ref": _WHERE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class DescribedApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _, shared = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_WHERE)
            document.setdefault("components", {}).setdefault("schemas", {}).update(shared["$defs"])
        return super().openapi()
