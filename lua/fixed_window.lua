-- Fixed windows. The Rust half, src/limit/strategy/fixed_window.rs, explains the algorithm.
--
-- Stored: start of the caller's window, or its end in a calendar; granted amount; expiry of the key, which the policy keeps between
-- `load` and `save`.
--
-- State: start of the current window, and the amount granted in it.
--
-- Uses decode, encode, max, min, now and outside of call.lua; lasting and write of prelude.lua.

local FORMAT, LENGTH = '<i7I5I5', 17

-- With the offset -1, a window starts with the first charge. A calendar has the borders of two windows, in order, in the
-- place of the period, the offset and the width. An offset is less than its period.
local function policy(capacity, period, offset, width)
  if offset < period then
    return { capacity = capacity, period = period, offset = offset, is_window = true }
  end
  local start, stop = period, offset
  if now >= stop then
    start, stop = stop, width
  end
  outside = outside or now < start or now >= stop
  return { capacity = capacity, period = stop - start, offset = start, is_window = true, is_calendar = true }
end

-- Returns the start of the current window: the last boundary of the clock, or now.
local function window_start(policy, now)
  if policy.offset == -1 then
    return now
  end
  return now - (now - policy.offset) % policy.period
end

-- Returns the start of the current window of a calendar, the count, and whether the state must be saved. The count of another
-- calendar keeps its end, unless that is in the second half of this window: then it ends with this window, and a microsecond
-- later. So its end is odd, and it is extended only once. The start is the end minus the length of this window.
local function load_calendar(policy, now, stop, count)
  local period = policy.period
  if count == 0 or stop <= now then
    return policy.offset, 0
  elseif stop - now > 2 * period then
    return policy.offset, count, nil, true
  elseif stop % 2 == 0 and stop < policy.offset + period and 2 * (stop - policy.offset) > period then
    return policy.offset + 1, count, nil, true
  end
  return stop - period, count
end

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    policy.expires = nil
    return window_start(policy, now), 0
  end
  local start, count
  start, count, policy.expires = decode(FORMAT, value)
  if policy.is_calendar then
    return load_calendar(policy, now, start, count)
  elseif start > now then
    return window_start(policy, now), count, nil, true
  elseif count > 0 and now - start < policy.period then
    return start, count
  end
  return window_start(policy, now), 0
end

local function room(policy, now, start, count)
  return policy.capacity - count
end

local function wait(policy, key, now, cost, start, count)
  return start + policy.period - now
end

local function charge(policy, key, now, cost, start, count)
  return start, count + cost
end

-- The charge is refunded only if it was made in the current window.
local function refund(policy, key, now, cost, of, start, count)
  if 2 * (start + policy.period - now - (of.reset - of.age)) >= policy.period then
    return 0, start, count
  end
  return min(cost, count), start, max(0, count - cost)
end

local function reset(policy, now, start, count)
  if count == 0 then
    return 0
  end
  return start + policy.period - now
end

local function save(policy, key, now, at, cost, start, count)
  local expires, text = lasting(policy.expires, at, 0)
  local border = policy.is_calendar and start + policy.period or start
  write(key, encode(FORMAT, border, count, expires), text)
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  refund = refund,
  reset = reset,
  save = save,
}
