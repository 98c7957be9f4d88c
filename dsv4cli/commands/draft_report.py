"""Draft statistics of `dsv4 run` and `dsv4 chat`, or the reason why drafts are off."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.config.model_config import ModelConfig
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
    from dsv4cli.engine.settings import Drafting


def draft_words(report: "DraftReport") -> str:
    """Return tokens per step and the acceptance rate, as text."""
    per_step = report.tokens_per_step
    if per_step is None or not report.drafted:
        return f"none ({report.drafter})"
    share = 100 * report.accepted / report.drafted
    return f"{per_step:.1f} tokens per step, {share:.0f} % of {report.drafted:,} accepted ({report.drafter})"


def report_drafts(out: Output, report: "DraftReport | None") -> None:
    """Print the draft statistics, if any step could have had drafts."""
    if report is not None and report.steps:
        out.status(f"drafts: {draft_words(report)}")


def report_no_drafter(out: Output, config: "ModelConfig", model: "Transformer", drafting: "Drafting") -> None:
    """Print why the checkpoint's drafter was not loaded, unless the user turned drafting off."""
    from dsv4cli.engine.weights.offload import offload_of

    if drafting.most is not None or config.drafter == "none" or model.config.drafter != "none":
        return
    if offload_of(model) is not None:
        out.status("drafts are off: they do not pay with experts in host memory")
    else:
        out.status("drafts are off: the drafter does not fit next to the other weights")
