"""`dsv4 inspect --for PROGRAM`: whether another program would load the model, why not, and how to start it."""

from typing import TYPE_CHECKING

from dsv4cli.errors import Dsv4Error, UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.output import Output, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.deployment.flags import EngineName
    from dsv4cli.engine.deployment.plan import DeploymentPlan
    from dsv4cli.engine.inspection.consumers.judge import Consumer, ConsumerVerdict
    from dsv4cli.engine.inspection.report import Inspection

ANSWERS = {True: "would load", False: "would not load", None: "may or may not load"}


def show_verdict(out: Output, result: "Inspection", consumer: "Consumer", gpus: str | None = None) -> bool:
    """Print whether another program would load the model. Return the answer; unknown counts as False.

    Args:
        gpus: the GPUs of `--gpus`, for which the command of vLLM or SGLang is planned; None for the usual command.

    Raises UsageError for a single file and for random weights.
    """
    from dsv4cli.engine.inspection.consumers.examine import judge
    from dsv4cli.engine.inspection.consumers.judge import verdict_document
    from dsv4cli.engine.inspection.consumers.served import remote_files

    found, plan, problem = judge(result, consumer, **remote_files(result)), None, None
    if gpus is not None and consumer in ("vllm", "sglang") and found.loads is not False:
        try:
            plan = _plan(result, consumer, gpus)
        except UsageError:
            raise
        except Dsv4Error as error:
            problem = error
    out.document(verdict_document(result.source.name, found, None if plan is None else plan.record()))
    _report(out, result.source.name, found, show_step=plan is None and problem is None)
    if plan is not None:
        _report_plan(out, plan)
    if problem is not None:
        out.paragraph(problem.message, "  ")
        out.line(f"→ {problem.remedy}")
    return found.loads is True and problem is None


def _plan(result: "Inspection", engine: "EngineName", gpus: str) -> "DeploymentPlan":
    from dsv4cli.engine.deployment.flags import ServerSettings
    from dsv4cli.engine.deployment.plan import plan_deployment
    from dsv4cli.engine.inspection.consumers.served import inspected_model
    from dsv4cli.engine.inspection.fit.cluster import parse_cluster

    return plan_deployment(engine, inspected_model(result), parse_cluster(gpus), ServerSettings(head="HEAD"))


def _report(out: Output, name: str, found: "ConsumerVerdict", *, show_step: bool) -> None:
    """Print the answer, its reasons, notes, and a command."""
    out.line(f"{found.version} {ANSWERS[found.loads]} {name}", strong=True)
    for reason in found.reasons:
        out.paragraph(reason if found.loads is False else f"not known: {reason}", "  ")
    for note in found.notes:
        out.paragraph(f"note: {note}", "  ")
    step = found.command or found.remedy
    if step and show_step:
        out.line(f"→ {step}")


def _report_plan(out: Output, plan: "DeploymentPlan") -> None:
    """Print the layout, each flag with its reason, and the command of each machine."""
    deployment = plan.deployment
    weights = size_text(deployment.weights_per_gpu)
    out.line(f"{deployment.cluster}: {deployment.layout}, {weights} of weights on each GPU")
    flags = [*plan.environment(), *plan.flags()]
    out.table(
        [["flag", "reason"], *([" ".join([one.name, *map(shell_word, one.values)]), one.reason] for one in flags)]
    )
    for note in plan.notes():
        out.paragraph(f"note: {note}", "  ")
    for node in plan.nodes:
        machine = f"machine {node}: " if len(plan.nodes) > 1 else ""
        out.line(f"→ {machine}{plan.shell_line(node)}")
