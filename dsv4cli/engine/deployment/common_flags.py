"""Flags with the same name and meaning in vLLM and SGLang."""

from dsv4cli.engine.deployment.flags import FlagRule

REVISION = FlagRule("--revision", lambda d, node: d.model.revision or None, "the revision in the model's name")
MACHINES = (
    FlagRule("--nnodes", lambda d, node: d.cluster.nodes if d.cluster.nodes > 1 else None, "number of machines"),
    FlagRule("--node-rank", lambda d, node: node if d.cluster.nodes > 1 else None, "this machine"),
)
ADDRESS = (
    FlagRule("--host", lambda d, node: d.settings.host if node == 0 else None, "address of the API"),
    FlagRule("--port", lambda d, node: d.settings.port if node == 0 else None, "port of the API"),
)
