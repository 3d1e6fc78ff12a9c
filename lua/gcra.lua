-- GCRA; the twin of src/limit/strategy/gcra.rs, which explains it.
--
-- Stored: the theoretical arrival time in whole microseconds, and its rest in ticks.
-- While it is decided on: the backlog, how far that time is ahead of now, in ticks.

local gcra = {}

function gcra.policy(capacity, interval, ticks)
  local full = capacity * interval
  return {
    capacity = capacity,
    interval = interval,
    ticks = ticks,
    full = full,
    furthest = floor(2 * full / ticks) + 1,
  }
end

function gcra.load(policy, key, now)
  local tat, rest = read(key)
  if tat < now then
    return 0
  end
  local ahead = min(tat - now, policy.furthest)
  return min(ahead * policy.ticks + max(0, min(rest, policy.ticks - 1)), 2 * policy.full)
end

function gcra.room(policy, now, backlog)
  return floor((policy.full - backlog) / policy.interval)
end

function gcra.wait(policy, key, now, cost, backlog)
  return div_ceil(backlog + cost * policy.interval - policy.full, policy.ticks)
end

function gcra.charge(policy, now, cost, backlog)
  return max(0, backlog + cost * policy.interval)
end

function gcra.reset(policy, key, now, backlog)
  return div_ceil(backlog, policy.ticks)
end

function gcra.save(policy, key, now, fresh_at, backlog)
  return write(key, now + floor(backlog / policy.ticks), backlog % policy.ticks, fresh_at)
end

return gcra
