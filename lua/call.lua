-- The arguments of a call. The script of checks consists of common.lua, this file, prelude.lua, meter.lua, the strategies,
-- check.lua, problem.lua and reply.lua.
--
-- KEYS   for each entry, in order: the key of the remembered answer, if its plan has ids; then one key per policy
-- ARGV   strings of packed numbers:
--          call            number of policies; number of plans; the time in microseconds since the Unix epoch, for
--                          tests, or 0 for Redis's own time
--          policies        each: strategy, the four numbers that the strategy's `policy` function takes, and for a meter
--                          the bytes that name its quota in a value
--          plans           each: mode; cost; a number that depends on the mode; the numbers of its policies, counted
--                          from 1. The number after the cost is
--                            for a take ahead, the maximum wait in microseconds until its turn, when the cost fits;
--                            for a refund of a turn, -1;
--                            for a charge whose debt must refill in time, minus that time in microseconds;
--                            for any other check, the microseconds for which its answer is remembered under its id, or
--                            longer, until the fixed windows that have counted it end; 0 without an id.
--                          A check that only records an id (RECORD) charges nothing, and its cost is what the
--                          remembered answer has granted.
--                          The plan of a refund ends with the charge that it refunds, in full or in part: its cost; its
--                          minimum age in microseconds; its time as in its answer, or 0; and for each policy the `reset`
--                          of that answer
--          runs            the other arguments, each: the number of a plan, counted from 1; the number of consecutive
--                          entries of this plan; the number of checks of each entry. Equal takes of one caller share an
--                          entry, so that no key occurs twice in a run of takes. Under a policy of requests in flight,
--                          the slot's id follows for each take, renewal and release
-- Reply  a string of integers of 8 bytes. Four for each entry, each of its checks, and each of its policies:
--          granted         charged or refunded units; if negative, a problem (see problem.lua)
--          remaining       the largest cost that would be allowed now
--          wait            0 if this policy allows the check; otherwise the microseconds until it would, or until the
--                          turn taken ahead is due; -1 for never
--          reset           microseconds until no charge counts
--        If the time is outside of the borders of a calendar, the reply is only the time, and no check is decided.
--        After the numbers of an entry with an id: the time of its charge in microseconds, which is that of the first
--        answer if this one repeats it. At the end of the reply: the time of the call in microseconds
--
-- Each check may fail separately. A denied check and a peek write nothing, with two exceptions. Both remove expired
-- slots. A denied check also saves a state whose time is in the future, since another clock has written it, with the
-- current time: otherwise its caller could stay locked out.
--
-- Redis runs the whole script for each call, so the most frequent calls have separate scripts (take.lua and takes.lua).
-- This script creates the functions of a strategy only if a policy uses it, and those for rarer checks only if a check
-- needs them.

local CALL, POLICY, POLICY_LENGTH, PLAN, PLAN_LENGTH = '<I4I4i7', '<I1i7i7i7i7', 29, '<I1I4i7', 12
local RUN, RUN_LENGTH, SLOT_LENGTH = '<I4I4I4', 12, 8
local NUMBER, NUMBER_LENGTH = '<I4', 4
local CHARGE_OF, CHARGE_OF_LENGTH, RESET_OF, RESET_OF_LENGTH = '<I4i7i7', 18, '<i7', 7

local policy_count, plan_count, now = decode(CALL, ARGV[1])

-- Redis expires keys by its own time. Under another time they are kept for a day longer than needed.
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

-- Whether the time is outside of the borders of a policy's calendar.
local outside

-- Preallocated for twelve answers: a table that grows is copied each time its size doubles.
local reply = {
  nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
}
local replied, key_at = 0, 0

-- The failed checks, as a linked list: the place of each one's answers in the reply, and the error.
local failures
