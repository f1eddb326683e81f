"""What a disassembly (cuobjdump --dump-sass) says of a kernel's loops and registers."""

import re

# instructions on the registers that a warp's threads share, the first of which they write
WRITES = (
    "UIADD", "UMOV", "ULEA", "USHF", "ULOP", "USGXT", "UIMAD", "USEL", "ULDC", "UIMNMX",
    "UPRMT", "UFLO", "UPOPC", "UBMSK", "UIABS", "S2UR", "R2UR", "VOTEU", "REDUX",
)  # fmt: skip


def instructions(sass: str) -> list[tuple[int, str]]:
    """(address, text) of each."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", sass)
    return [(int(address, 16), text) for address, text in found]


def product_loops(sass: str) -> list[dict[str, int]]:
    """Of each innermost loop with matrix products: how often it has an instruction.

    'HGMMA' the products, 'WARPGROUP.ARRIVE' once for each group of them that runs by itself,
    'spills' the loads from and stores to the stack, 'R2UR' the copies of a thread's register to one
    that the warp shares: where ptxas counts in those at once, there are none. 'MUFU.EX2' the
    exponentials, 'instructions' all of them, 'registers' those that any of them names.
    """
    code = instructions(sass)
    spans = []
    for address, text in code:
        # with a condition: without one it leads back out of a wait that took longer
        target = re.search(r"^@\S+ +BRA 0x([0-9a-f]+)", text)
        if target and int(target.group(1), 16) < address:
            start = int(target.group(1), 16)
            inside = [t for at, t in code if start <= at <= address]
            if any("HGMMA" in t for t in inside):
                spans.append((start, address, inside))
    innermost = [
        inside
        for start, end, inside in spans
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b, _ in spans)
    ]
    return [
        {
            "HGMMA": sum("HGMMA" in text for text in loop),
            "WARPGROUP.ARRIVE": sum("WARPGROUP.ARRIVE" in text for text in loop),
            "spills": sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in loop),
            "R2UR": sum("R2UR" in text for text in loop),
            "MUFU.EX2": sum("MUFU.EX2" in text for text in loop),
            "instructions": len(loop),
            "registers": len(set().union(*map(named_registers, loop))),
        }
        for loop in innermost
    ]


def exponents(sass: str) -> dict[str, int]:
    """How the argument of each exponential (MUFU.EX2) was made: operation -> how often.

    'FADD' a score less the max; 'FFMA' that and the score's scaling in one multiply-add, where the
    product isn't rounded as the max was. A multiplication after it (by log2(e), or to avoid numbers
    too small) is looked through.
    """
    made: dict[str, int] = {}
    code = [text for _, text in instructions(sass)]
    for at, text in enumerate(code):
        if not (found := re.search(r"MUFU\.EX2 R\d+, -?R(\d+)", text)):
            continue
        register, made_by = found.group(1), "none"
        for earlier in reversed(code[:at]):
            source = re.search(rf"^(?:@\S+ +)?([A-Z0-9]+)\S* R{register}, -?\|?R(\d+)", earlier)
            if source:
                made_by = source.group(1)
                if made_by != "FMUL":
                    break
                register = source.group(2)
        made[made_by] = made.get(made_by, 0) + 1
    return made


def named_registers(text: str) -> set[int]:
    """The registers of a thread that an instruction names, for a product all that it works on."""
    found = {int(number) for number in re.findall(r"(?<![A-Z])R(\d+)\b", text)}
    if product := re.match(r"HGMMA\.64x(\d+)x16\S* R(\d+), (?:R(\d+))?", text):
        columns, out, left = product.groups()
        found |= set(range(int(out), int(out) + int(columns) // 2))  # an accumulator, 64 rows of it
        found |= {int(left) + i for i in range(4)} if left else set()  # 64 x 16 in 16 bits
    return found


def register_budgets(sass: str) -> list[int]:
    """How many registers a thread's warps are given, or keep, on the way."""
    return sorted(
        {int(x, 16) for x in re.findall(r"USETMAXREG\S* (?:UP\d+, )?0x([0-9a-f]+)", sass)}
    )


def barrier_numbers(sass: str) -> list[int]:
    """The named barriers whose number is a constant in the instruction."""
    return sorted({int(x, 16) for x in re.findall(r"\bBAR\.(?:SYNC|ARV)\S* 0x([0-9a-f]+)", sass)})


def shared_registers(text: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction writes, and those that it reads."""
    op, _, rest = re.sub(r"^@\S+ +", "", text).partition(" ")
    named = [int(number) for number in re.findall(r"(?<![A-Z])UR(\d+)", rest)]
    written: set[int] = set()
    if op.startswith("HGMMA"):  # its descriptors: of both operands, or where the left one is in
        first = int(re.findall(r"gdesc\[UR(\d+)\]", rest)[0])  # registers, of the right one
        left_in_registers = re.match(r"R\d+, R\d+", rest)
        return written, set(range(first + (2 if left_in_registers else 0), first + 4))
    pairs = op.startswith("U") and ".64" in op
    if op.startswith(WRITES) and named:
        pair = pairs or ".WIDE" in op or op.startswith("ULDC.64")
        written = {named[0], named[0] + 1} if pair else {named[0]}
        named = named[1:]
    return written, {n + more for n in named for more in range(2 if pairs else 1)}


def reads_before_writes(sass: str) -> bool:
    """Whether all threads of a program meet between its last read of memory and its first write."""
    code = [text for _, text in instructions(sass)]
    reads = [at for at, text in enumerate(code) if "LDG" in text]
    writes = [at for at, text in enumerate(code) if "STG" in text]
    return any("BAR.SYNC" in text for text in code[max(reads) : min(writes)])


def copied(text: str) -> bool:
    """Whether an instruction copies one uniform register to another, whatever the condition."""
    return re.search(r"\bUMOV UR\d+, UR\d+", text) is not None


def unset_registers(sass: str) -> list[str]:
    """Instructions that read a uniform register which on some way to them nothing has written.

    A copy (UMOV) of such a register is as unset as the register: ptxas copies both halves of an
    address, and may compute the upper one only behind that.
    """
    code = instructions(sass)
    index = {address: i for i, (address, _) in enumerate(code)}
    after: list[list[int]] = []
    for i, (_, text) in enumerate(code):
        body = re.sub(r"^@\S+ +", "", text)
        jump = re.match(r"BRA(?:\.\S+)? .*?0x([0-9a-f]+)", body)
        ends = (jump or body.startswith(("EXIT", "BRX"))) and body == text
        after.append(([index[int(jump.group(1), 16)]] if jump else []) + ([] if ends else [i + 1]))
    after[-1] = [i for i in after[-1] if i < len(code)]
    reached = {i for targets in after for i in targets}
    roles = [i for i in range(1, len(code)) if i not in reached]  # BRX sends each warp to its own
    uses = [shared_registers(text) for _, text in code]
    surely: dict[int, frozenset[int]] = {0: frozenset()}
    work = [0]
    while work:
        i = work.pop()
        out = surely[i] | uses[i][0]
        if copied(code[i][1]) and uses[i][1] - surely[i]:
            out -= uses[i][0]
        for target in roles if "BRX" in code[i][1] else after[i]:
            now = surely[target] & out if target in surely else frozenset(out)
            if surely.get(target) != now:
                surely[target] = now
                work.append(target)
    read = {i: uses[i][1] - known for i, known in sorted(surely.items())}
    return [code[i][1] for i, unset in read.items() if unset and not copied(code[i][1])]
