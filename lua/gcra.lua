-- GCRA; the twin of src/limit/strategy/gcra.rs, which explains it.
--
-- Stored: when the caller was charged last, the backlog then in ticks, and how many ticks made a unit of cost.
-- Loaded: the backlog, how far the theoretical arrival time is ahead of now, in ticks.

local FORMAT, LENGTH = '<i7I7I7', 21

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return 0
  end
  return drained(policy, now, unpack(FORMAT, value))
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
  write(key, pack(FORMAT, now, backlog, policy.interval), at)
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
