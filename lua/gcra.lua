-- GCRA; the twin of src/limit/strategy/gcra.rs, which explains it.
--
-- Stored: the theoretical arrival time in whole microseconds, its rest in ticks, and the interval and ticks that it was
-- reckoned with.
-- Loaded: the backlog, how far that time is ahead of now, in ticks.

local FORMAT, LENGTH = '<i7I5I7I5', 24

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return 0
  end
  local tat, rest, interval, ticks = unpack(FORMAT, value)
  if tat < now then
    return 0
  end
  local ahead = tat - now
  if interval == policy.interval and ticks == policy.ticks then
    local most = 2 * policy.full
    if ahead <= policy.furthest then
      local backlog = ahead * ticks + rest
      if backlog <= most then
        return backlog
      end
    end
    return most, nil, nil, true
  end
  -- Of another quota: as many units are owed, at the new rate.
  interval, ticks = max(1, interval), max(1, ticks)
  ahead = min(ahead, floor(4503599627370496 / ticks))
  local units = div_ceil(ahead * ticks + rest, interval)
  return min(units, 2 * policy.capacity) * policy.interval, nil, nil, true
end

local function room(policy, now, backlog)
  local left, interval = policy.full - backlog, policy.interval
  return (left - left % interval) / interval
end

local function wait(policy, key, now, cost, backlog)
  return div_ceil(backlog + cost * policy.interval - policy.full, policy.ticks)
end

local function charge(policy, key, now, cost, backlog)
  backlog = backlog + cost * policy.interval
  return backlog > 0 and backlog or 0
end

local function reset(policy, now, backlog)
  local ticks = policy.ticks
  return (backlog + -backlog % ticks) / ticks
end

local function save(policy, key, now, at, cost, backlog)
  local ticks = policy.ticks
  local rest = backlog % ticks
  write(key, pack(FORMAT, now + (backlog - rest) / ticks, rest, policy.interval, ticks), at)
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
