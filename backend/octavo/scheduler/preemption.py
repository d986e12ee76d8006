"""What making room costs, by swap and by recomputation, from measured rates.

Knows nothing of sequences, queues or how the rates were measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Compare moving KV to the host and back with computing it again.

    A swap copies each block twice, out and in, in one operation each way:

        swap_s      = 2 * (copy_latency_s + num_blocks * bytes_per_block / copy_bytes_per_s)
        recompute_s = num_tokens / prefill_tokens_per_s

    The model is deliberately simple. The rate of prefill is that of a prompt without much context,
    so recomputing a long context costs more than it says; and a swap-in that the device makes
    beside its computing costs less. Both errors favour recomputation, which needs no host memory.
    """

    bytes_per_block: int
    copy_bytes_per_s: float
    """Between device and host, the mean of both ways."""
    copy_latency_s: float
    """What one copy operation takes beside its bytes; infinite where there is no host memory."""
    prefill_tokens_per_s: float

    def swap_s(self, num_blocks: int) -> float:
        """Return the seconds that copying `num_blocks` out and back takes."""
        one_way_s = num_blocks * self.bytes_per_block / self.copy_bytes_per_s
        return 2 * (self.copy_latency_s + one_way_s)

    def recompute_s(self, num_tokens: int) -> float:
        """Return the seconds that computing the KV of `num_tokens` again takes."""
        return num_tokens / self.prefill_tokens_per_s

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Say whether swapping `num_blocks` is cheaper than recomputing `num_tokens`."""
        return self.swap_s(num_blocks) < self.recompute_s(num_tokens)
