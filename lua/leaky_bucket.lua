-- Leaky bucket; the twin of src/limit/strategy/leaky_bucket.rs, which explains it.
--
-- Stored: when the bucket was filled last, its level in whole units, and the rest in ticks.
-- Loaded: the level at now, in ticks.

local FORMAT, LENGTH = '<i7i6I7', 20

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return 0
  end
  local filled, units, rest = unpack(FORMAT, value)
  local level = max(0, min(units, 2 * policy.capacity)) * policy.interval + min(rest, policy.interval - 1)
  local leaked = max(0, min(now - filled, policy.furthest)) * policy.ticks
  return max(0, min(level, 2 * policy.full) - leaked), nil, nil, filled > now
end

local function room(policy, now, level)
  local left, interval = policy.full - level, policy.interval
  return (left - left % interval) / interval
end

local function wait(policy, key, now, cost, level)
  return div_ceil(level + cost * policy.interval - policy.full, policy.ticks)
end

local function charge(policy, key, now, cost, level)
  return max(0, level + cost * policy.interval)
end

local function reset(policy, now, level)
  local ticks = policy.ticks
  return (level + -level % ticks) / ticks
end

local function save(policy, key, now, at, cost, level)
  local interval = policy.interval
  local rest = level % interval
  write(key, pack(FORMAT, now, (level - rest) / interval, rest), at)
end

return {
  policy = refilling,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  reset = reset,
  save = save,
}
