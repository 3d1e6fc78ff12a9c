-- Leaky bucket; the twin of src/limit/strategy/leaky_bucket.rs, which explains it.
--
-- Stored: when the bucket was filled last, its level in whole units, and the rest in ticks.
-- Loaded: the level at now, in ticks.

local leaky_bucket = {}

local FORMAT, LENGTH = '<i7i6I7', 20

leaky_bucket.policy = refilling

function leaky_bucket.load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return 0
  end
  local filled, units, rest = unpack(FORMAT, value)
  local level = max(0, min(units, 2 * policy.capacity)) * policy.interval + min(rest, policy.interval - 1)
  local leaked = max(0, min(now - filled, policy.furthest)) * policy.ticks
  return max(0, min(level, 2 * policy.full) - leaked), nil, nil, filled > now
end

function leaky_bucket.room(policy, now, level)
  local left, interval = policy.full - level, policy.interval
  return (left - left % interval) / interval
end

function leaky_bucket.wait(policy, key, now, cost, level)
  return div_ceil(level + cost * policy.interval - policy.full, policy.ticks)
end

function leaky_bucket.charge(policy, key, now, cost, level)
  return max(0, level + cost * policy.interval)
end

function leaky_bucket.reset(policy, now, level)
  local ticks = policy.ticks
  return (level + -level % ticks) / ticks
end

function leaky_bucket.save(policy, key, now, at, cost, level)
  local interval = policy.interval
  local rest = level % interval
  write(key, pack(FORMAT, now, (level - rest) / interval, rest), at)
end

return leaky_bucket
