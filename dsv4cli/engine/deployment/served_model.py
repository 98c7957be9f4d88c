"""The model that an engine serves, as far as its flags depend on it."""

from dataclasses import dataclass, replace
from functools import cached_property

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.names import ALIASES
from dsv4cli.engine.checkpoint.sizes import stored_bytes
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.weights.sizes import is_drafter
from dsv4cli.harmless import shell_word

# rows and columns of a block with one scale in an FP8 matrix: a shard must have whole blocks
FP8_BLOCK = 128


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint.

    Attributes:
        name: the folder, or the repository on the Hugging Face Hub.
        label: what clients call the model unless the user says otherwise.
        revision: of the repository; '' for the default.
        local: whether `name` is a folder.
    """

    name: str
    label: str
    config: ModelConfig
    formats: Formats
    revision: str = ""
    local: bool = False

    @property
    def own_command(self) -> str:
        """The command that serves the model with dsv4 instead of another engine."""
        return f"dsv4 serve --model {shell_word(self.label if self.label in ALIASES else self.name)}"

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the unsharded weights."""
        return self.expert_bytes + self.other_bytes

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts, their gates, and the drafter, most of which is experts too."""
        one, two = self._with_experts(1), self._with_experts(2)
        return sum(one) + (self.config.n_routed_experts - 1) * (sum(two) - sum(one)) - self.other_bytes

    @cached_property
    def other_bytes(self) -> int:
        """Bytes of everything else: embedding, attention, shared experts, output matrix."""
        return self._with_experts(1)[1]

    def _with_experts(self, count: int) -> tuple[int, int]:
        """Return the bytes of experts and drafter, and of the rest, of a model with this number of experts.

        Sizes are linear in the number of experts, and a table with two of 384 experts takes a fraction of the time.
        """
        specs = expected_tensors(replace(self.config, n_routed_experts=count), self.formats).values()
        experts = sum(stored_bytes(spec) for spec in specs if spec.expert is not None or is_drafter(spec))
        return experts, sum(map(stored_bytes, specs)) - experts

    def splits_blocks(self, ranks: int) -> bool:
        """Return whether sharding an expert over the ranks would split its FP8 blocks."""
        uneven = ranks > 1 and self.config.moe_intermediate_size % (ranks * FP8_BLOCK) != 0
        return uneven and self.formats.linear.startswith("fp8")

    def refusal(self, ranks: int) -> str:
        """Return why tensor parallelism cannot shard the attention over the ranks, '' if it can."""
        counts = {"attention heads": self.config.num_attention_heads, "output groups": self.config.o_groups}
        indivisible = [f"{count} {what}" for what, count in counts.items() if count % ranks]
        return f"{' and '.join(indivisible)} cannot be divided by {ranks}" if indivisible else ""
