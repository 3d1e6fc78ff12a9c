-- Token bucket; the twin of src/limit/strategy/token_bucket.rs, which explains it.
--
-- Stored: when the bucket was refilled last, its whole tokens, and the rest in ticks.
-- Loaded: the tokens at now, in ticks, and when they were refilled last.

local FORMAT, LENGTH = '<i7i6I7', 20

-- `ticks` flow in every microsecond if `period` is 0; else they come at once, after every period.
local function policy(capacity, interval, ticks, period)
  local policy = refilling(capacity, interval, ticks)
  policy.period = period
  return policy
end

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    return policy.full, now
  end
  local refilled, tokens, rest = unpack(FORMAT, value)
  local future = refilled > now
  refilled = min(refilled, now)
  tokens = max(-policy.capacity, min(tokens, policy.capacity)) * policy.interval + min(rest, policy.interval - 1)
  if policy.period > 0 then
    local missing = div_ceil(policy.full - tokens, policy.ticks)
    local periods = min(floor((now - refilled) / policy.period), missing)
    tokens, refilled = tokens + periods * policy.ticks, refilled + periods * policy.period
  else
    tokens, refilled = tokens + min(now - refilled, policy.furthest) * policy.ticks, now
  end
  if tokens >= policy.full then
    return policy.full, now
  end
  return tokens, refilled, nil, future
end

local function room(policy, now, tokens)
  local interval = policy.interval
  return (tokens - tokens % interval) / interval
end

-- Until so many ticks have come.
local function refill(policy, now, ticks, refilled)
  if policy.period > 0 then
    return refilled + div_ceil(ticks, policy.ticks) * policy.period - now
  end
  return (ticks + -ticks % policy.ticks) / policy.ticks
end

local function wait(policy, key, now, cost, tokens, refilled)
  return refill(policy, now, cost * policy.interval - tokens, refilled)
end

local function charge(policy, key, now, cost, tokens, refilled)
  return min(policy.full, tokens - cost * policy.interval), refilled
end

local function reset(policy, now, tokens, refilled)
  if tokens == policy.full then
    return 0
  end
  return refill(policy, now, policy.full - tokens, refilled)
end

local function save(policy, key, now, at, cost, tokens, refilled)
  local interval = policy.interval
  local rest = tokens % interval
  write(key, pack(FORMAT, refilled, (tokens - rest) / interval, rest), at)
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
