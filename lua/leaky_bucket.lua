-- Leaky bucket; the twin of src/limit/strategy/leaky_bucket.rs, which explains it.
--
-- Stored: when the bucket was filled last, its level then in ticks, and how many ticks made a unit of cost.
-- Loaded: the level at now, in ticks.

local FORMAT, LENGTH = '<i7I7I7', 21

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return 0
  end
  return drained(policy, now, unpack(FORMAT, value))
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
  write(key, pack(FORMAT, now, level, policy.interval), at)
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
