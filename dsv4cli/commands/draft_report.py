"""What `dsv4 run` and `dsv4 chat` tell of drafts: what they came to, or why there are none."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.config.model_config import ModelConfig
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
    from dsv4cli.engine.settings import Drafting


def draft_words(report: "DraftReport") -> str:
    """What drafts came to."""
    per_step = report.tokens_per_step
    if per_step is None or not report.drafted:
        return f"none ({report.drafter})"
    share = 100 * report.accepted / report.drafted
    return f"{per_step:.1f} tokens per step, {share:.0f} % of {report.drafted:,} accepted ({report.drafter})"


def report_drafts(out: Output, report: "DraftReport | None") -> None:
    """Says what drafts came to; nothing where no step could have had any."""
    if report is not None and report.steps:
        out.status(f"drafts: {draft_words(report)}")


def report_no_drafter(out: Output, config: "ModelConfig", model: "Transformer", drafting: "Drafting") -> None:
    """Says why a drafter that the checkpoint's `config` has was not loaded, where the user has not asked for that."""
    from dsv4cli.engine.weights.offload import offload_of

    if drafting.most is not None or config.drafter == "none" or model.config.drafter != "none":
        return
    if offload_of(model) is not None:
        out.status("drafts are off: they do not pay with experts in host memory")
    else:
        out.status("drafts are off: the drafter does not fit next to the other weights")
