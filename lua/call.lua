-- The arguments of a call. The script of checks is this file, prelude.lua, meter.lua, the strategies, check.lua, problem.lua
-- and reply.lua.
--
-- KEYS   for each entry, in their order: where its answer is remembered, if its plan says so; one key per policy.
-- ARGV   strings of packed numbers:
--          call            how many policies, how many plans, the time: 0 for Redis's own, otherwise microseconds since
--                          the Unix epoch, for tests
--          policies        each: strategy, and the four numbers that its `policy` function takes
--          plans           what is asked; each: mode, cost, microseconds for which the answer is remembered under the
--                          check's id (0: it has none), or within which a take ahead has to be due, or
--                          below 0 in which the debt of a charge must refill, or -1 if a refund is of a turn
--                          that was taken ahead, then its policies by their place above; of a refund after that the charge of which it refunds: how much
--                          it was; how many microseconds ago at least; the time that was answered then, or 0; and for
--                          each policy the `reset` that was answered then
--          runs            to the end; each: a plan by its place above, how many entries in a row follow it, and how many
--                          times each of these is asked: takes of one caller that ask the same share an entry, so that
--                          no key comes twice in a run of takes. Under a policy of requests in flight, the id of a slot
--                          follows for each take, renewal and release
-- Reply  a string of whole numbers, of 8 bytes each; for each entry, each time it is asked and each of its policies four:
--          granted         what was charged or refunded; below 0, what was the matter (see `problem`)
--          remaining       the largest cost that would pass now
--          wait            0 if this policy let it pass; microseconds until it would, or until what it took ahead is due;
--                          -1 for never
--          reset           microseconds until nothing is charged any more
--        for an entry whose answer is remembered, then when it was charged, in microseconds; it may be told again
--        and last the time of the call, in microseconds
--
-- A check may fail by itself. One that is denied, and a peek, write nothing; but a state of a time to come, which another
-- clock has left behind, is put right by a denial too, or its caller might be locked out, and slots that have expired are
-- removed.
--
-- Redis runs the whole script for each call. So the most frequent call has a separate script (`takes.lua`). This one makes the
-- functions of a strategy only if a policy has it, and the functions of rarer checks only for such a check.

local CALL, POLICY, PLAN, PLAN_LENGTH = '<I4I4i7', '<I1i7i7i7i7', '<I1I4i7', 12
local RUN, RUN_LENGTH, SLOT_LENGTH = '<I4I4I4', 12, 8
local NUMBER, NUMBER_LENGTH = '<I4', 4
local CHARGE_OF, CHARGE_OF_LENGTH, RESET_OF, RESET_OF_LENGTH = '<I4i7i7', 18, '<i7', 7

local KEYS, ARGV = KEYS, ARGV
local encode, decode = struct.pack, struct.unpack
local byte, sub = string.byte, string.sub
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local redis_pcall = redis.pcall

local policy_count, plan_count, now = decode(CALL, ARGV[1])

-- The longest time by which a turn may be reserved ahead, in microseconds: a day. And the most ticks of a debt.
local DAY, MAX_TICKS = 86400000000, 2 ^ 52

-- Redis expires keys by its own time; those of another are kept for a day longer than they need.
local keep = 0
do
  local time = redis_pcall('TIME')
  if time.err then
    return time
  end
  local real = time[1] * 1000000 + time[2]
  if now == 0 then
    now = real
  else
    keep = real - now + DAY
  end
end

-- Sums and expiries are kept without what is above this: no two that are kept are as far apart.
local WRAP = 2 ^ 40

-- No key is to live for as many milliseconds: four years. One that seems to has a value that is not ours.
local LONGEST = 2 ^ 37

-- The most keys that one command reads, and numbers that are packed at once: Lua passes no more than 8,000 values at a
-- time.
local MOST = 4000

-- It has room for twelve answers from the start: a table that grows is copied whenever it doubles.
local reply = {
  nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
}
local replied, key_at = 0, 0

-- What failed: where its answers are in the reply, and why.
local failures
