"""First launch: gate and up rows of every slot's expert, activated, into h; and the statistics of its input."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import operands, ptx, rows, rows8, slots, statistics
from pagedweight.kernels.gates import activation, gated_activation


@triton.jit
def _tile_rows(tile, index, INTERMEDIATE: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Row of the linear-block of the index-th of 2 ROWS rows: ROWS gate rows, then their up rows; or rows in order."""
    if GATED:
        within = tl.minimum(tile * ROWS + index % ROWS, INTERMEDIATE - 1)
        return (index // ROWS) * INTERMEDIATE + within
    else:
        return tl.minimum(tile * 2 * ROWS + index, INTERMEDIATE - 1)


@triton.jit
def _store_h(
    h_ptr, sums, pair, used_pair, tile, INTERMEDIATE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Activates the products (2 ROWS, TOKENS) of a tile into its columns of h."""
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, ROWS, TOKENS)), (1, 2, 0)))
        h = gated_activation(gate, up, ACTIVATION, LIMIT)
        column = tile * ROWS + tl.arange(0, ROWS)
    else:
        h = activation(sums, ACTIVATION)
        column = tile * 2 * ROWS + tl.arange(0, 2 * ROWS)
    used = used_pair[None, :] & (column < INTERMEDIATE)[:, None]
    tl.store(h_ptr + pair[None, :] * INTERMEDIATE + column[:, None], h.to(h_ptr.dtype.element_ty), used)


@triton.jit
def _token(
    x_ptr, out_ptr, ids_ptr, weights_ptr, slot_ptr, mass_ptr, counts_ptr, features_ptr, arrivals_ptr,
    token, layer, layers, request_slots, counted_experts, experts, HIDDEN: tl.constexpr, CHOICES: tl.constexpr,
    PADDED: tl.constexpr, ARRIVALS: tl.constexpr,
):  # fmt: skip
    """Counts one token, clears its arrival counters, and writes its output if no expert will."""
    entry, weight, counted, routed = statistics.token_choices(
        ids_ptr, weights_ptr, slot_ptr, token, layer, layers, request_slots, counted_experts, experts, CHOICES, PADDED
    )
    tl.atomic_add(mass_ptr + entry, weight, counted, sem="relaxed")
    tl.atomic_add(counts_ptr + entry, 1, counted, sem="relaxed")
    one_row = tl.zeros((1,), tl.int32) + token * HIDDEN
    norm = tl.sum(statistics.row_norms(x_ptr, one_row, one_row >= 0, HIDDEN))
    statistics.add_features(features_ptr, entry, weight, norm, counted, 0)
    for first in range(0, ARRIVALS, 128):
        counter = first + tl.arange(0, 128)
        tl.store(arrivals_ptr + token * ARRIVALS + counter, 0, counter < ARRIVALS)
    if routed == 0:
        for first in range(0, HIDDEN, 1024):
            column = first + tl.arange(0, 1024)
            tl.store(out_ptr + token * HIDDEN + column, 0.0, column < HIDDEN)


@triton.jit
def _tile(
    x_ptr, digits_ptr, scales_ptr, h_ptr, ids_ptr, plan_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr, first_row, slot,
    tile, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTHS: tl.constexpr, CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, PLANNED: tl.constexpr, PTX: tl.constexpr, INT8: tl.constexpr,
    ORDERS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    digit_column = tl.arange(0, 2 * TOKENS) // 2
    column = tl.arange(0, CHUNKS * TOKENS) % TOKENS
    token_column = tl.arange(0, TOKENS)
    expert, pairs, pair = slots.slot_pairs(plan_ptr, ids_ptr, slot, column, EXPERTS, TOKENS, PLANNED)
    digit_pair = slots.slot_pairs(plan_ptr, ids_ptr, slot, digit_column, EXPERTS, TOKENS, PLANNED)[2]
    own_pair = slots.slot_pairs(plan_ptr, ids_ptr, slot, token_column, EXPERTS, TOKENS, PLANNED)[2]
    if pairs > 0:
        block_row = first_row + 2 * expert
        committed = tl.load(bits_ptr + block_row)
        table = tl.load(table_ptr + block_row)
        address_ptr = frame_ptr + block_row.to(tl.int64) * (PLANES * PLANE_FRAMES)
        row = _tile_rows(tile, tl.arange(0, 2 * ROWS), INTERMEDIATE, ROWS, GATED)
        STEPS: tl.constexpr = (HIDDEN + 512 * CHUNKS - 1) // (512 * CHUNKS)
        SINGLE: tl.constexpr = STEPS == 1 and not (INT8 and PLANNED)
        index = rows.operand_rows(2 * ROWS * CHUNKS, WARPS, SINGLE)
        operand_row = _tile_rows(tile, index // CHUNKS, INTERMEDIATE, ROWS, GATED)
        frames = operands.plane_rows(address_ptr, operand_row, operands.item(WIDTHS, -1), PLANE_FRAMES, FRAME_ROWS)
        room = ptx.shared_room(ROOM) if ROOM > 0 else None
        sums = tl.zeros((2 * ROWS, TOKENS), tl.float32)
        for i in tl.static_range(len(WIDTHS)):
            if committed == WIDTHS[i]:
                BYTES: tl.constexpr = INT8 and rows8.takes_bytes(operands.item(CODEBOOKS, i), WIDTHS[i])
                if BYTES and PLANNED:
                    sums = rows8.rows_product(
                        digits_ptr, scales_ptr, digit_pair // CHOICES, own_pair // CHOICES, pairs, frames, table, row,
                        operand_row, 0, STEPS, WIDTHS[i], operands.item(CODEBOOKS, i), ORDERS, HIDDEN, FRAME_ROWS,
                        TOKENS, STAGES, False, PTX,
                    )  # fmt: skip
                elif BYTES:
                    sums = rows8.token_product(
                        x_ptr + (slot // CHOICES) * HIDDEN, frames, table, row, operand_row, index % CHUNKS, 0, STEPS,
                        WIDTHS[i], operands.item(CODEBOOKS, i), HIDDEN, FRAME_ROWS, CHUNKS, STAGES, SINGLE, WARPS,
                        False, PTX,
                    )  # fmt: skip
                else:
                    sums = rows.rows_product(
                        x_ptr, (pair // CHOICES) * HIDDEN, column < pairs, frames, table, row, operand_row,
                        index % CHUNKS, 0, STEPS, WIDTHS[i], operands.item(CODEBOOKS, i), HIDDEN, FRAME_ROWS, CHUNKS,
                        TOKENS, STAGES, SINGLE, WARPS, False, PTX, room,
                    )  # fmt: skip
        if BIAS:
            sums += tl.load(bias_ptr + expert * ((1 + GATED) * INTERMEDIATE) + row).to(tl.float32)[:, None]
        _store_h(
            h_ptr, sums, own_pair, token_column < pairs, tile, INTERMEDIATE, ROWS, TOKENS, ACTIVATION, GATED, LIMIT
        )


@triton.jit(do_not_specialize=["tokens", "first_row", "layer", "layers", "request_slots", "counted_experts"])
def _gate_up_kernel(
    x_ptr, digits_ptr, scales_ptr, h_ptr, out_ptr, ids_ptr, weights_ptr, slot_ptr, plan_ptr, bits_ptr, frame_ptr,
    table_ptr, bias_ptr, mass_ptr,
    counts_ptr, features_ptr, arrivals_ptr, tokens, first_row, layer, layers, request_slots, counted_experts,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    PADDED: tl.constexpr, ARRIVALS: tl.constexpr, PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr,
    FRAME_ROWS: tl.constexpr, ACTIVATION: tl.constexpr, WIDTHS: tl.constexpr, CODEBOOKS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    PLANNED: tl.constexpr,
    PTX: tl.constexpr, INT8: tl.constexpr, ORDERS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    BIAS: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS gate and the same up rows of one slot's expert, or one token's statistics.

    Grid (tokens + slots * ceil(I / ROWS),). h[pair, i] = act(gate_i . x + bias_i, up_i . x + bias_{I+i}). Experts
    without a gate have 2 ROWS rows a program, and h[pair, i] = act(row_i . x + bias_i). Reads the planes below
    the committed width only; frames above it, and rows of h whose id is no expert, may be anything.
    """
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # After the wait: what the next launch reads before its own wait is then complete, the plan for one.
        tl.extra.cuda.gdc_launch_dependents()
    if program < tokens:
        _token(
            x_ptr, out_ptr, ids_ptr, weights_ptr, slot_ptr, mass_ptr, counts_ptr, features_ptr, arrivals_ptr,
            program, layer, layers, request_slots, counted_experts, EXPERTS, HIDDEN, CHOICES, PADDED, ARRIVALS,
        )  # fmt: skip
    else:
        TILE_ROWS: tl.constexpr = ROWS if GATED else 2 * ROWS
        TILES: tl.constexpr = (INTERMEDIATE + TILE_ROWS - 1) // TILE_ROWS
        item = program - tokens
        _tile(
            x_ptr, digits_ptr, scales_ptr, h_ptr, ids_ptr, plan_ptr, bits_ptr, frame_ptr, table_ptr, bias_ptr,
            first_row, item // TILES, item % TILES,
            HIDDEN, INTERMEDIATE, EXPERTS, CHOICES, PLANES, PLANE_FRAMES, FRAME_ROWS, ACTIVATION, WIDTHS, CODEBOOKS,
            ROWS, CHUNKS, TOKENS, STAGES, WARPS, PLANNED, PTX, INT8, ORDERS, GATED, LIMIT, BIAS, ROOM,
        )  # fmt: skip
