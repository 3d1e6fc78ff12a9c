-- The call: what it asks.
--
-- KEYS   for each entry, in their order: where its answer is remembered, if its plan says so; one key per policy.
-- ARGV   strings of packed numbers:
--          call            how many policies, how many plans, the time: 0 for Redis's own, otherwise microseconds since
--                          the Unix epoch, for tests; and the number of the instance that asks
--          policies        each: strategy, and the four numbers that its `policy` function takes
--          plans           what is asked; each: mode, cost, microseconds for which the answer is remembered under the
--                          check's id (0: it has none), or within which a take ahead has to be due, then its policies
--                          by their place above; of a refund after that the charge of which it refunds: how much
--                          it was; how many microseconds ago at least; the time that was answered then, or 0; and for
--                          each policy the `reset` that was answered then
--          runs            to the end; each: a plan by its place above, how many entries in a row follow it, and how many
--                          times each of these is asked: takes of one caller that ask the same share an entry, so that
--                          no key comes twice in a run of takes
-- Reply  whole numbers; for each entry, each time it is asked and each of its policies four:
--          granted         what was charged or refunded; below 0, what was the matter (see `problem`)
--          remaining       the largest cost that would pass now
--          wait            0 if this policy let it pass; microseconds until it would, or until what it took ahead is due;
--                          -1 for never
--          reset           microseconds until nothing is charged any more
--        for an entry whose answer is remembered, then when it was charged, in microseconds; it may be told again
--        and last the time of the call, in microseconds
--
-- A check may fail by itself. One that is denied, and a peek, write nothing; but a state of a time to come, which another
-- clock has left behind, is put right by a denial too, or its caller might be locked out.
--
-- Redis makes all functions and tables anew for each call. So a strategy is made only if it is asked for, and so is what
-- decides anything but takes under one policy without an id.

local CALL, POLICY, PLAN, PLAN_LENGTH, RUN = '<I4I4i7I6', '<I1i7i7i7i7', '<I1I4i7', 12, '<I4I4I4'
local NUMBER, NUMBER_LENGTH = '<I4', 4
local CHARGE_OF, CHARGE_OF_LENGTH, RESET_OF, RESET_OF_LENGTH = '<I4i7i7', 18, '<i7', 7

local KEYS, ARGV = KEYS, ARGV
local encode, decode = struct.pack, struct.unpack
local byte = string.byte

local policy_count, plan_count, now, instance = decode(CALL, ARGV[1])

-- Redis expires keys by its own time; those of another are kept for a day longer than they need.
local keep = 0
do
  local time = redis.pcall('TIME')
  if time.err then
    return time
  end
  local real = time[1] * 1000000 + time[2]
  if now == 0 then
    now = real
  else
    keep = real - now + 86400000000
  end
end

-- The strategies by their number, and what counts requests in flight by its own; those that are asked for are made below.
local strategies = {}
for i = 2, 1 + policy_count do
  strategies[byte(ARGV[i])] = true
end
