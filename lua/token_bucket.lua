-- Token bucket; the twin of src/limit/strategy/token_bucket.rs, which explains it.
--
-- Stored: when the bucket was refilled last, what it lacked then in ticks, and how many ticks made a token; when
-- the key expires, which the policy keeps from `load` to `save`.
-- Registers: the tokens at now, in ticks, and when they were refilled last.
--
-- Uses decode, encode, floor, max and min of call.lua; div_ceil, lasting, refill_functions and write of prelude.lua.

local refilling, drained, kept, kept_of = refill_functions()
local FORMAT, LENGTH = '<i7I7I7I5', 26

-- `ticks` flow in every microsecond if `period` is 0; else they come at once, after every period.
local function policy(capacity, interval, ticks, period)
  local policy = refilling(capacity, interval, ticks)
  policy.period = period
  return policy
end

local function load(policy, key, now, value)
  if not value or #value ~= LENGTH then
    policy.expires = nil
    return policy.full, now
  end
  local refilled, missing, interval, future, _
  refilled, missing, interval, policy.expires = decode(FORMAT, value)
  if policy.period == 0 then
    missing, _, _, future = drained(policy, now, refilled, missing, interval)
    return policy.full - missing, now, nil, future
  end
  missing, future = drained(policy, now, now, missing, interval), refilled > now
  refilled = min(refilled, now)
  local periods = min(floor((now - refilled) / policy.period), div_ceil(missing, policy.ticks))
  missing = missing - periods * policy.ticks
  if missing <= 0 then
    return policy.full, now
  end
  return policy.full - missing, refilled + periods * policy.period, nil, future
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
  return tokens - cost * policy.interval, refilled
end

-- By how many times ticks have come at once since the charge.
local function kept_of_periods(policy, now, cost, of, refilled)
  local period, most = policy.period, policy.furthest
  local reset = min(of.reset, most * period)
  local still = floor((now + max(0, reset - of.age) - refilled + floor(period / 2)) / period)
  local times = max(0, min(div_ceil(reset, period) - still, most))
  return kept_of(policy, cost, of, times * policy.ticks)
end

local function refund(policy, key, now, cost, of, tokens, refilled)
  local ticks
  if policy.period > 0 then
    ticks = kept_of_periods(policy, now, cost, of, refilled)
  else
    ticks = kept(policy, cost, of)
  end
  return div_ceil(ticks, policy.interval), min(policy.full, tokens + ticks), refilled
end

local function reset(policy, now, tokens, refilled)
  if tokens == policy.full then
    return 0
  end
  return refill(policy, now, policy.full - tokens, refilled)
end

local function save(policy, key, now, at, cost, tokens, refilled)
  local expires, text = lasting(policy.expires, at, 1)
  write(key, encode(FORMAT, refilled, policy.full - tokens, policy.interval, expires), text)
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
