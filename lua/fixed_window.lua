-- Fixed windows; the twin of src/limit/strategy/fixed_window.rs, which explains them.
--
-- Stored: when the caller's window began, the time of the last charge, and what was granted in the window; when
-- the key expires, which the policy keeps from `load` to `save`.
-- Registers: when the window began that holds now, and what was granted in it.
--
-- Uses decode, encode, max and min of call.lua; lasting, late and write of prelude.lua.

local FORMAT, LENGTH = '<i7i7I5I5', 24

-- An offset of -1: a window begins at the first charge.
local function policy(capacity, period, offset)
  return { capacity = capacity, period = period, offset = offset }
end

-- When the window that holds now began, if one began at `start` and others followed it without a gap. On the clock they
-- begin at its borders instead.
local function window_start(policy, now, start)
  if policy.offset >= 0 then
    start = policy.offset
  end
  return now - (now - start) % policy.period
end

-- When the window that began at `start` ends: after a period, and on the clock at the next border from there on.
local function window_end(policy, start)
  local stop = start + policy.period
  if policy.offset >= 0 then
    return stop + (policy.offset - stop) % policy.period
  end
  return stop
end

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    policy.expires = nil
    return window_start(policy, now, now), 0
  end
  local start, last, count
  start, last, count, policy.expires = decode(FORMAT, value)
  count = min(count, 2 * policy.capacity)
  if start > now then
    return window_start(policy, now, now), count, nil, true
  elseif count > 0 and now - start < policy.period then
    return start, count, nil, last > now
  end
  local stop = window_end(policy, start)
  if count > 0 and now < stop then
    return start, count, nil, last > now
  elseif count > 0 and last >= stop then
    -- Of a window that another quota has prolonged.
    local begun = window_start(policy, now, start)
    if last >= begun then
      return begun, late(policy, count, start, last, stop), nil, last > now
    end
  end
  return window_start(policy, now, now), 0
end

local function room(policy, now, start, count)
  return policy.capacity - count
end

local function wait(policy, key, now, cost, start, count)
  return window_end(policy, start) - now
end

local function charge(policy, key, now, cost, start, count)
  return start, count + cost
end

-- Of a charge in the window that holds now.
local function refund(policy, key, now, cost, of, start, count)
  if 2 * (window_end(policy, start) - now - (of.reset - of.age)) >= policy.period then
    return 0, start, count
  end
  return cost, start, max(0, count - cost)
end

local function reset(policy, now, start, count)
  if count == 0 then
    return 0
  end
  return window_end(policy, start) - now
end

local function save(policy, key, now, at, cost, start, count)
  local expires, text = lasting(policy.expires, at, 0)
  write(key, encode(FORMAT, start, now, count, expires), text)
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
