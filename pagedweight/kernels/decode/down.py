"""Second launch: down rows of every slot's expert; whoever completes a token's rows adds them up and writes them."""

# ruff: noqa: RUF005 - kernels join tuples with +; they cannot unpack them.
from __future__ import annotations

import triton
import triton.language as tl

from pagedweight.kernels.decode import operands, ptx, rows, rows8, slots, statistics


@triton.jit
def _routed_weights(ids_ptr, weights_ptr, token, used, EXPERTS: tl.constexpr, CHOICES: tl.constexpr):
    """Of tokens (TOKENS,): how many choices are experts, and by choice whether it is one, and its weight or zero."""
    count = tl.zeros_like(token)
    is_expert = ()
    weights = ()
    for i in tl.static_range(CHOICES):
        expert = tl.load(ids_ptr + token * CHOICES + i, used, other=-1)
        # The weight of an id that is no expert may be anything.
        weight = tl.load(weights_ptr + token * CHOICES + i, used, other=0.0).to(tl.float32)
        routed = (expert >= 0) & (expert < EXPERTS)
        count += routed.to(tl.int32)
        is_expert = is_expert + (routed,)
        weights = weights + (tl.where(routed, weight, 0.0),)
    return count, is_expert, weights


@triton.jit
def _combine(
    parts_ptr, out_ptr, arrivals_ptr, token, used, routed, is_expert, weights, out_row, tile,
    HIDDEN: tl.constexpr, CHOICES: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Announce this program's parts; where a token's are all there, out = sum_a r_a sum_s part, in that order."""
    # Every thread's part is stored before the arrival that announces it.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + token * TILES + tile, 1, used, sem="acq_rel")
    complete = used & (arrived == routed * SPLITS - 1)
    if tl.max(complete.to(tl.int32), 0) > 0:
        write = (out_row < HIDDEN)[:, None] & complete[None, :]
        total = tl.zeros((out_row.shape[0], token.shape[0]), tl.float32)
        for i in tl.static_range(CHOICES):
            add = write & is_expert[i][None, :]
            for split in tl.static_range(SPLITS):
                part = ((token * CHOICES + i) * SPLITS + split)[None, :] * HIDDEN + out_row[:, None]
                total += weights[i][None, :] * tl.load(parts_ptr + part, add, other=0.0, cache_modifier=".cg")
        tl.store(out_ptr + token[None, :] * HIDDEN + out_row[:, None], total.to(out_ptr.dtype.element_ty), write)


@triton.jit
def _tile(
    h_ptr, digits_ptr, scales_ptr, parts_ptr, out_ptr, ids_ptr, weights_ptr, plan_ptr, bits_ptr, frame_ptr, table_ptr,
    bias_ptr, arrivals_ptr, first_row, slot, tile, split,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    PADDED: tl.constexpr, PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr,
    WIDTHS: tl.constexpr, CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, PLANNED: tl.constexpr, PTX: tl.constexpr,
    INT8: tl.constexpr,
    ORDERS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, SEPARATE_SUM: tl.constexpr,
    EARLY_ROUTING: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    STEPS: tl.constexpr = (INTERMEDIATE + 512 * CHUNKS - 1) // (512 * CHUNKS)
    digit_column = tl.arange(0, 2 * TOKENS) // 2
    column = tl.arange(0, CHUNKS * TOKENS) % TOKENS
    token_column = tl.arange(0, TOKENS)
    expert, pairs, pair = slots.slot_pairs(plan_ptr, ids_ptr, slot, column, EXPERTS, TOKENS, PLANNED)
    digit_pair = slots.slot_pairs(plan_ptr, ids_ptr, slot, digit_column, EXPERTS, TOKENS, PLANNED)[2]
    own_pair = slots.slot_pairs(plan_ptr, ids_ptr, slot, token_column, EXPERTS, TOKENS, PLANNED)[2]
    if pairs > 0:
        block_row = first_row + 2 * expert + 1
        committed = tl.load(bits_ptr + block_row)
        table = tl.load(table_ptr + block_row)
        address_ptr = frame_ptr + block_row.to(tl.int64) * (PLANES * PLANE_FRAMES)
        row = tl.minimum(tile * ROWS + tl.arange(0, ROWS), HIDDEN - 1)
        SINGLE: tl.constexpr = STEPS == SPLITS and not (INT8 and PLANNED)
        index = rows.operand_rows(ROWS * CHUNKS, WARPS, SINGLE)
        operand_row = tl.minimum(tile * ROWS + index // CHUNKS, HIDDEN - 1)
        frames = operands.plane_rows(address_ptr, operand_row, operands.item(WIDTHS, -1), PLANE_FRAMES, FRAME_ROWS)
        used = token_column < pairs
        if EARLY_ROUTING:
            routed, is_expert, weights = _routed_weights(
                ids_ptr, weights_ptr, own_pair // CHOICES, used, EXPERTS, CHOICES
            )
        room = ptx.shared_room(ROOM) if ROOM > 0 else None
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for i in tl.static_range(len(WIDTHS)):
            if committed == WIDTHS[i]:
                BYTES: tl.constexpr = INT8 and rows8.takes_bytes(operands.item(CODEBOOKS, i), WIDTHS[i])
                if BYTES and PLANNED:
                    sums = rows8.rows_product(
                        digits_ptr, scales_ptr, digit_pair, own_pair, pairs, frames, table, row, operand_row,
                        split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, WIDTHS[i], operands.item(CODEBOOKS, i),
                        ORDERS, INTERMEDIATE, FRAME_ROWS, TOKENS, STAGES, PDL, PTX,
                    )  # fmt: skip
                elif BYTES:
                    sums = rows8.token_product(
                        h_ptr + slot * INTERMEDIATE, frames, table, row, operand_row, index % CHUNKS,
                        split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, WIDTHS[i], operands.item(CODEBOOKS, i),
                        INTERMEDIATE, FRAME_ROWS, CHUNKS, STAGES, SINGLE, WARPS, PDL, PTX,
                    )  # fmt: skip
                else:
                    sums = rows.rows_product(
                        h_ptr, pair * INTERMEDIATE, column < pairs, frames, table, row, operand_row, index % CHUNKS,
                        split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, WIDTHS[i], operands.item(CODEBOOKS, i),
                        INTERMEDIATE, FRAME_ROWS, CHUNKS, TOKENS, STAGES, SINGLE, WARPS, PDL, PTX, room,
                    )  # fmt: skip
        if BIAS:
            # Once for every pair: by the program with the first columns.
            bias = tl.load(bias_ptr + expert * HIDDEN + row, row * 0 + split == 0, other=0.0)
            sums += bias.to(tl.float32)[:, None]
        out_row = tile * ROWS + tl.arange(0, ROWS)
        part = (own_pair * SPLITS + split)[None, :] * HIDDEN + out_row[:, None]
        tl.store(parts_ptr + part, sums, used[None, :] & (out_row < HIDDEN)[:, None])
        if not SEPARATE_SUM:
            if not EARLY_ROUTING:
                # Before the arrival at the latest: after it, the last program would wait for them alone.
                routed, is_expert, weights = _routed_weights(
                    ids_ptr, weights_ptr, own_pair // CHOICES, used, EXPERTS, CHOICES
                )
            _combine(
                parts_ptr, out_ptr, arrivals_ptr, own_pair // CHOICES, used, routed, is_expert, weights, out_row, tile,
                HIDDEN, CHOICES, TILES, SPLITS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "first_row", "layer", "layers", "request_slots", "counted_experts"])
def _down_kernel(
    h_ptr, digits_ptr, scales_ptr, parts_ptr, out_ptr, ids_ptr, weights_ptr, slot_ptr, plan_ptr, bits_ptr, frame_ptr,
    table_ptr, bias_ptr, features_ptr, arrivals_ptr, tokens, first_row, layer, layers, request_slots, counted_experts,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    PADDED: tl.constexpr, PLANES: tl.constexpr, PLANE_FRAMES: tl.constexpr, FRAME_ROWS: tl.constexpr,
    WIDTHS: tl.constexpr, CODEBOOKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, PLANNED: tl.constexpr, PTX: tl.constexpr,
    INT8: tl.constexpr,
    ORDERS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, SEPARATE_SUM: tl.constexpr,
    EARLY_ROUTING: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program: ROWS output rows of one slot's expert over one of SPLITS column ranges, or one token's statistics.

    Grid (tokens + slots * ceil(H / ROWS) * SPLITS,). out[t] = sum_a r[t, a] (down_{e(t, a)} h[t, a] + bias), always
    added in the order of a, so equal inputs give equal bits.
    """
    program = tl.program_id(0)
    if PDL and SEPARATE_SUM:
        tl.extra.cuda.gdc_launch_dependents()
    if program < tokens:
        entry, weight, counted, _routed = statistics.token_choices(
            ids_ptr, weights_ptr, slot_ptr, program, layer, layers, request_slots, counted_experts, EXPERTS, CHOICES,
            PADDED,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
        start = (program * CHOICES + tl.arange(0, PADDED)) * INTERMEDIATE
        norm = statistics.row_norms(h_ptr, start, counted, INTERMEDIATE)
        statistics.add_features(features_ptr, entry, weight, norm, counted, 1)
    else:
        TILES: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
        item = program - tokens
        _tile(
            h_ptr, digits_ptr, scales_ptr, parts_ptr, out_ptr, ids_ptr, weights_ptr, plan_ptr, bits_ptr, frame_ptr,
            table_ptr, bias_ptr, arrivals_ptr, first_row, item // (TILES * SPLITS), (item // SPLITS) % TILES,
            item % SPLITS,
            HIDDEN, INTERMEDIATE, EXPERTS, CHOICES, PADDED, PLANES, PLANE_FRAMES, FRAME_ROWS, WIDTHS, CODEBOOKS,
            ROWS, CHUNKS, TOKENS, SPLITS, STAGES, WARPS, PLANNED, PTX, INT8, ORDERS, BIAS, PDL, SEPARATE_SUM,
            EARLY_ROUTING, ROOM,
        )  # fmt: skip
