"""Which program sizes exist for a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.shapes import bucket_for, powers_of_two

SMALLEST_PREFILL = 16
SMALLEST_WIDTH = 256  # tokens
WIDTH_FACTOR = 4  # between neighbouring widths
MOST_PROMPTS = 16  # that one step reads


@dataclass(frozen=True)
class Buckets:
    """Sizes programs are compiled for.

    Attributes:
        decode_batch: batch rows of decode and verify programs, rising; the last is ``max_running_requests``.
        prefill_tokens: tokens of prefill programs, rising; the last is ``chunked_prefill_size``.
        prompt_rows: of those sizes that have one, rows of the program that reads several prompts of up to that size.
        width_tokens: context tokens the block table can name, rising; the last covers the context length.
        verify_tokens: tokens per row of verify programs.
    """

    decode_batch: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    width_tokens: tuple[int, ...]
    verify_tokens: tuple[int, ...] = ()
    prompt_rows: Mapping[int, int] = field(default_factory=dict)

    def prompt_size(self, num_prompts: int, longest: int) -> tuple[int, int]:
        """Rows, and tokens of each, of the program that reads these prompts, or this chunk of one."""
        tokens = bucket_for(longest, self.prefill_tokens)
        return 1 if num_prompts == 1 else self.prompt_rows[tokens], tokens

    @property
    def prefill_steps(self) -> tuple[int, ...]:
        """How many tokens the prefill programs compute, padding included, rising."""
        return tuple(sorted({*self.prefill_tokens, *(rows * tokens for tokens, rows in self.prompt_rows.items())}))

    @property
    def most_drafts(self) -> int:
        """Drafts per row of the largest verify program; 0 where none verifies."""
        return max(self.verify_tokens, default=1) - 1

    def width_for(self, max_length: int) -> int:
        """The smallest width, in tokens, that holds a sequence of ``max_length``."""
        return bucket_for(max_length, self.width_tokens)

    def all_sizes(self) -> list[tuple[ForwardMode, int, int, int]]:
        """(mode, batch, queries, width in tokens) of every program; prefill first, largest last."""
        sizes = []
        for width in self.width_tokens:
            sizes += [(ForwardMode.EXTEND, 1, tokens, width) for tokens in self.prefill_tokens]
            sizes += [(ForwardMode.EXTEND, rows, tokens, width) for tokens, rows in self.prompt_rows.items()]
            sizes += [(ForwardMode.DECODE, batch, 1, width) for batch in self.decode_batch]
            for tokens in self.verify_tokens:
                sizes += [(ForwardMode.TARGET_VERIFY, batch, tokens, width) for batch in self.decode_batch]
        return sizes


def make_buckets(
    config: EngineConfig, context_length: int, width_buckets: bool, verify_tokens: tuple[int, ...] = ()
) -> Buckets:
    """Buckets for a configuration.

    Args:
        width_buckets: false gives one width, the whole context.
        verify_tokens: see ``Buckets``.

    Raises:
        ConfigError: a bucket beyond the limit it serves.
    """
    chunk = min(config.chunked_prefill_size, context_length)
    prefill = config.prefill_token_buckets or powers_of_two(chunk, min(SMALLEST_PREFILL, chunk))
    decode = config.decode_batch_buckets or powers_of_two(config.max_running_requests)
    if decode[-1] > config.max_running_requests:
        raise ConfigError(
            f"decode bucket {decode[-1]} is larger than --max-running-requests {config.max_running_requests}"
        )
    # Every size up to the limits must have a program, so the limits themselves close the lists.
    prefill = tuple(sorted({*(b for b in prefill if b <= chunk), chunk}))
    decode = tuple(sorted({*decode, config.max_running_requests}))
    widths = [context_length]
    if width_buckets:
        size = SMALLEST_WIDTH
        while size < context_length:
            widths.append(size)
            size *= WIDTH_FACTOR
    return Buckets(decode, prefill, tuple(sorted(widths)), verify_tokens, _prompt_rows(config, prefill))


def _prompt_rows(config: EngineConfig, prefill: tuple[int, ...]) -> dict[int, int]:
    """Rows of the programs that read several prompts, by tokens of a row. One for each size, as many rows as the step
    may have: programs take long to compile, and padding is cheap beside launching once more."""
    most_tokens = prefill[-1] if config.max_prefill_tokens is None else config.max_prefill_tokens
    most_rows = min(config.max_running_requests, MOST_PROMPTS)
    rows = {tokens: min(most_tokens // tokens, most_rows) for tokens in prefill}
    return {tokens: 1 << (count.bit_length() - 1) for tokens, count in rows.items() if count > 1}
