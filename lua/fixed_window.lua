-- Fixed windows; the twin of src/limit/strategy/fixed_window.rs, which explains them.
--
-- Stored and loaded: when the caller's window began (with windows of the clock, the time of the last charge), and
-- what was granted in it.

local FORMAT, LENGTH = '<i8i8', 16

-- An offset of -1: a window begins at the first charge.
local function policy(capacity, period, offset)
  return { capacity = capacity, period = period, offset = offset }
end

-- When the window that holds now ends.
local function window_end(policy, now, since)
  if policy.offset >= 0 then
    return now - (now - policy.offset) % policy.period + policy.period
  end
  return since + policy.period
end

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return now, 0
  end
  local since, count = unpack(FORMAT, value)
  local future = since > now
  since, count = min(since, now), max(0, min(count, 2 * policy.capacity))
  if count == 0 or since < window_end(policy, now, since) - policy.period or since <= now - policy.period then
    return now, 0
  end
  return since, count, nil, future
end

local function room(policy, now, since, count)
  return policy.capacity - count
end

local function wait(policy, key, now, cost, since, count)
  return window_end(policy, now, since) - now
end

local function charge(policy, key, now, cost, since, count)
  if policy.offset >= 0 then
    since = now
  end
  return since, max(0, count + cost)
end

local function reset(policy, now, since, count)
  if count == 0 then
    return 0
  end
  return window_end(policy, now, since) - now
end

local function save(policy, key, now, at, cost, since, count)
  write(key, pack(FORMAT, since, count), at)
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  reset = reset,
  save = save,
}
