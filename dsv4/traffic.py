"""Bytes that the experts of one mixture cost the processes which share them, by the form of the exchange.

    gather       every process has every token and computes the slots of its own experts; the sums are added up (all-reduce)
    all-to-all   every process takes a slice of the tokens and sends each slot's row to the process that has its expert; results come
                 back, are weighted and added up where the token is, and the slices are put together (all-gather)

What one process sends, of T tokens with k slots, rows of H numbers of w bytes, E experts dealt out evenly to R processes and hit evenly,
S = ceil(T / R) tokens in the largest slice:

    gather       2 (R-1)/R T H 4                     float32 sums, by a ring
    all-to-all   2 (R-1)/R S k H w                   rows there and back
                 + (R-1) S H w                       slices
                 + (R-1) E/R 8                       how many rows come for each expert

Per token of many, over (R-1)/R H bytes: 8 against (2 k / R + 1) w. So rows pay from R > 2k/3 processes on in bfloat16 and from R > 2k in
float32, if there are tokens enough: an exchange costs time whatever it carries, for which EXCHANGE bytes are counted. The backward pass
makes the same exchanges the other way, and is not counted. Work is the same in both forms.
"""

from dataclasses import dataclass

GATHER, ALL_TO_ALL = "gather", "all-to-all"
# What an exchange costs beside its bytes, in bytes: 20 us at 50 GB/s.
EXCHANGE = 1 << 20
# Exchanges of each form: the sums; counts, rows there, rows back, slices.
EXCHANGES = {GATHER: 1, ALL_TO_ALL: 4}
FLOAT32, INT64 = 4, 8


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends for one mixture, in either form."""

    gather: int
    all_to_all: int

    @property
    def form(self) -> str:
        """The cheaper one, "gather" or "all-to-all"."""
        costs = {GATHER: self.gather, ALL_TO_ALL: self.all_to_all}
        return min(costs, key=lambda form: costs[form] + EXCHANGES[form] * EXCHANGE)


def traffic(tokens: int, top_k: int, hidden: int, processes: int, experts: int, width: int = 2) -> Traffic:
    """The rule of this file. width: bytes of a number of the activations."""
    others, largest = processes - 1, slice_size(tokens, processes)
    rows = 2 * others * largest * top_k * hidden * width // processes
    return Traffic(
        gather=2 * others * tokens * hidden * FLOAT32 // processes,
        all_to_all=rows + others * largest * hidden * width + others * experts // processes * INT64,
    )


def slice_size(tokens: int, processes: int) -> int:
    """Tokens of each process's slice but the last ones', which get what is left."""
    return -(-tokens // processes)
