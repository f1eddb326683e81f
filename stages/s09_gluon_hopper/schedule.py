"""What all roles of stage 9 know: sizes and switches, and which rows and keys a query tile has."""

from stages.common.gluon import aggregate, gl, gluon


@gluon.jit
def by_section(tile, section, heads, blocks):
    """Head and block of a tile: sections of heads one by one, in each the blocks one by one."""
    part = tile // (section * blocks)
    rest = tile - part * section * blocks
    width = gl.minimum(section, heads - part * section)
    block = rest // width
    return part * section + rest - block * width, block


@gluon.jit
def valid_keys(problem, b):
    """How many keys of batch entry b are valid."""
    Nk_valid = problem.Nk
    if problem.HAS_SEQLENS:
        Nk_valid = gl.minimum(gl.maximum(gl.load(problem.seqlens_ptr + b), 0), problem.Nk)
    return Nk_valid


@aggregate
class Problem:
    """Sizes and switches: the same for all roles."""

    seqlens_ptr: gl.tensor
    H: gl.tensor
    group: gl.tensor  # query heads per key head
    Nq: gl.tensor
    Nk: gl.tensor
    blocks: gl.tensor  # of BLOCK_M rows, per head
    heads: gl.tensor  # of all batch entries together
    section: gl.tensor  # heads whose K and V fit the L2 cache together
    tiles: gl.tensor  # blocks * heads
    CAUSAL: gl.constexpr
    HAS_SEQLENS: gl.constexpr
    MASKED: gl.constexpr  # of the KV tiles that a consumer walks, how many may need a mask: 0, 1, 2
    LSE: gl.constexpr
    SHIFTED: gl.constexpr  # whether the KV tile walked first may begin earlier (`start`)
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, seqlens_ptr, H, group, Nq, Nk, blocks, heads, section, tiles,
        CAUSAL, HAS_SEQLENS, MASKED, LSE, BLOCK_M, BLOCK_N,
    ):  # fmt: skip
        self.seqlens_ptr = seqlens_ptr
        self.H = H
        self.group = group
        self.Nq = Nq
        self.Nk = Nk
        self.blocks = blocks
        self.heads = heads
        self.section = section
        self.tiles = tiles
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.HAS_SEQLENS = gl.constexpr(HAS_SEQLENS)
        self.MASKED = gl.constexpr(MASKED)
        self.LSE = gl.constexpr(LSE)
        # under a causal mask alone, what lies beyond the last key is loaded as zeros
        self.SHIFTED = gl.constexpr(MASKED > 0 and (HAS_SEQLENS or not CAUSAL))
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)

    @gluon.jit
    def place(self, tile):
        """Batch entry, head and first row of a tile.

        Section by section of heads, in each the blocks with the most keys first.
        """
        head, block = by_section(tile, self.section, self.heads, self.blocks)
        if self.CAUSAL:
            block = self.blocks - 1 - block
        b = head // self.H
        return b, head - b * self.H, block * self.BLOCK_M

    @gluon.jit
    def keys(self, b, start_m):
        """How many keys are valid, and how many KV tiles the block from start_m on walks."""
        Nk_valid = valid_keys(self, b)
        end = Nk_valid
        if self.CAUSAL:
            end = gl.minimum(start_m + self.BLOCK_M, self.Nq) + self.Nk - self.Nq
            end = gl.maximum(gl.minimum(end, Nk_valid), 0)
        # at least one: rows that see no key are computed like any other, and come out as 0
        return Nk_valid, gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)

    @gluon.jit
    def start(self, j, steps, Nk_valid):
        """The first key of the KV tile that is walked as the j-th.

        The one walked first ends with the last valid key at the latest, so that no value past it
        is ever loaded: 0 * NaN is NaN. It may begin amid the next one, which has those keys, too,
        so that they count there; or before the first key, where zeros are loaded.
        """
        start_n = (steps - 1 - j) * self.BLOCK_N
        if self.SHIFTED:
            start_n = gl.minimum(start_n, Nk_valid - self.BLOCK_N)
        return start_n

    @gluon.jit
    def seen(self, rows, Nk_valid):
        """How many keys each of `rows` sees, counted from the first; may be negative."""
        seen = gl.zeros_like(rows) + Nk_valid
        if self.CAUSAL:
            seen = gl.minimum(seen, rows + (self.Nk - self.Nq + 1))
        return seen

    @gluon.jit
    def hidden(self, first_row, Nk_valid, steps):
        """How many KV tiles, from the last back, no row of the 64 from first_row on sees.

        At least one is left; rows past Nq keep only that.
        """
        end = Nk_valid
        if self.CAUSAL:
            end = gl.minimum(end, first_row + 64 + self.Nk - self.Nq)
        end = gl.where(first_row < self.Nq, end, 0)
        return steps - gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)
