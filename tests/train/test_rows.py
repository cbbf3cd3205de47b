"""Sequences as rows of a batch: packed, masked, drawn by a seed, and computed ahead."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxspec.train import data
from jaxspec.train.ahead import ahead


def made_of(count: int, *, length: int = 10, seed: int = 0) -> data.Shards:
    """Sequences in which every token tells its sequence and offset."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, length + 1, count).astype(np.int32)
    tokens = 100 * np.arange(1, count + 1)[:, None] + np.arange(length)
    tokens = np.where(np.arange(length) < lengths[:, None], tokens, 0).astype(np.int32)
    prompts = rng.integers(1, lengths)
    rest = np.zeros(count, np.uint8)
    return data.Shards(tokens, lengths, prompts.astype(np.int32), rest, rest.astype(np.float32), {})


def test_rows_are_a_function_of_the_seed():
    rows, again, other = (data.packed(made_of(50), seed, 16) for seed in (1, 1, 2))
    np.testing.assert_array_equal(rows.tokens, again.tokens)
    np.testing.assert_array_equal(rows.mask, again.mask)
    assert (rows.tokens != other.tokens).any()


def test_packing_and_mask():
    shards = made_of(50)
    rows = data.packed(shards, 1, 16)
    assert rows.tokens.shape == rows.mask.shape == (shards.length.sum() // 16, 16)
    assert rows.tokens.dtype == shards.tokens.dtype
    assert rows.mask.dtype == bool
    sequence, offset = rows.tokens // 100 - 1, rows.tokens % 100
    assert (sequence >= 0).all()  # no padding
    expected = offset >= shards.prompt_length[sequence]
    expected[:, 0] = False
    assert (rows.mask == expected).all()
    stream, at = sequence.ravel(), offset.ravel()
    follows = (stream[1:] == stream[:-1]) & (at[1:] == at[:-1] + 1)
    begins = (at[1:] == 0) & (at[:-1] == shards.length[stream[:-1]] - 1)
    assert (follows | begins).all()
    assert len(set(rows.tokens.ravel().tolist())) == rows.tokens.size  # no token twice


def test_an_epoch_takes_every_row_once():
    """The first as they lie; every other one in an order of its own."""
    epochs = [np.concatenate([data.chosen(43, 1, 10 * epoch + step, 4) for step in range(10)]) for epoch in range(3)]
    np.testing.assert_array_equal(epochs[0], np.arange(40))
    for rows in epochs[1:]:
        assert len(set(rows.tolist())) == 40
        assert set(rows.tolist()) < set(range(43))
    assert (epochs[1] != epochs[2]).any()
    np.testing.assert_array_equal(data.chosen(43, 1, 13, 4), epochs[1][12:16])
    assert (data.chosen(43, 2, 13, 4) != epochs[1][12:16]).any()


def test_too_little_data_for_a_batch():
    with pytest.raises(ValueError, match="the data makes 43 rows, less than one batch of 64: generate more, or lower"):
        data.chosen(43, 0, 0, 64)


def test_ahead_computes_the_next_one_only():
    """In order, to the end; an error is told where its result was due."""
    begun = []

    def square(i):
        begun.append(i)
        if i == 4:
            raise KeyError(i)
        return i * i

    results = ahead(square, itertools.count())
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    results.close()
    assert len(begun) <= 4
    assert list(ahead(square, range(3))) == [0, 1, 4]
    assert list(ahead(square, ())) == []
    results = ahead(square, itertools.count())
    assert [next(results) for _ in range(4)] == [0, 1, 4, 9]
    with pytest.raises(KeyError):
        next(results)
