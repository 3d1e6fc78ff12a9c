-- The prelude: what the strategies and the driver share.
--
-- Time is Redis's own, in whole microseconds since the Unix epoch. All numbers are whole and below 2^53, where a
-- double is exact; the quotient of two such numbers, rounded down, is exact too.
--
-- A strategy is a table of functions, with the names and the order of its Rust half:
--   policy(four numbers)                      a policy, as the other functions take it
--   load(policy, key, now, value)             a state as it is now: up to three values, then whether it must be saved even
--                                             if nothing is charged, because it was not one of this policy at this time.
--                                             `value` is the string under the key, or nothing
--   room(policy, now, ...)                    the largest cost that would pass now; below 0 in debt
--   wait(policy, key, now, cost, ...)         microseconds until a cost would pass that does not now
--   charge(policy, key, now, cost, ...)       the state with a cost counted, or given back if it is below 0
--   reset(policy, now, ...)                   microseconds until the state is as if nothing had been charged
--   save(policy, key, now, at, cost, ...)     stores a state until `at`
-- One whose states are not strings says so by `reads = false`.
--
-- What runs for every check divides by operators, which cost less than a call: n - n % d is a multiple of d, rounded down,
-- and n + -n % d one rounded up. And it passes text to commands: Redis prints each number anew, and some versions of it print
-- one that ends in many zeros as 1.79e+12.

local pcall = redis.pcall
local floor, min, max = math.floor, math.min, math.max
local sub = string.sub

-- a / b, rounded up.
local function div_ceil(a, b)
  return -floor(-a / b)
end

-- A policy that refills little by little: `interval` ticks for each unit of cost, `ticks` in a microsecond.
local function refilling(capacity, interval, ticks)
  local full = capacity * interval
  return {
    capacity = capacity,
    interval = interval,
    ticks = ticks,
    full = full,
    -- Microseconds that no debt reaches.
    furthest = floor(2 * full / ticks) + 1,
  }
end

-- What has gone wrong with the check at hand: an error of Redis, or nothing.
local trouble

-- Notes the error in a reply, if it is one: the check at hand fails. Returns whether it is none.
local function good(reply)
  if type(reply) == 'table' and reply.err then
    trouble = trouble or reply.err
    return false
  end
  return true
end

-- Calls a command. If Redis refuses it, the check at hand fails, and nothing is returned.
local function try(...)
  local reply = pcall(...)
  return good(reply) and reply or nil
end

-- The strings under some of the keys of the call, in their order; nothing for one that does not exist or is no string.
local function read(first, last)
  local values = pcall('MGET', spread(KEYS, first, last))
  if values.err then
    good(values)
    return {}
  end
  return values
end

-- The first millisecond in which a state that is fresh at a microsecond says nothing any more, as text. The keys of a call
-- often share it.
local last_ms, last_text
local function expiry(at)
  local ms = (at + -at % 1000) / 1000
  if ms ~= last_ms then
    last_ms, last_text = ms, string.format('%.0f', ms)
  end
  return last_text
end

-- Stores bytes under a key until `at`.
local function write(key, value, at)
  local reply = pcall('SET', key, value, 'PXAT', expiry(at))
  if reply.err then
    good(reply)
  end
end
