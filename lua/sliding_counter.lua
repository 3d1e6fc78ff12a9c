-- Sliding counter; the twin of src/limit/strategy/sliding_counter.rs, which explains it.
--
-- Stored: when the caller's window began, how long after that the last charge was, what was granted in the window, and what in
-- the window before; when the key expires, which the policy keeps from `load` to `save`.
-- Registers: when the window began that holds now, what was granted in it, and what in the window before.
--
-- Uses decode, encode, floor, max and min of call.lua; lasting, late and write of prelude.lua.

local FORMAT, LENGTH = '<i7I6I5I5I5', 28

-- Below this a double holds every whole number.
local EXACT = 2 ^ 53

-- n * x / d, rounded down, and the rest; also where the product is not exact. x is at most d, d below 2^45.
local function mul_div(n, x, d)
  if n * x < EXACT then
    return floor(n * x / d), n * x % d
  end
  local quotient, rest = 0, 0
  local digit = 2 ^ 42
  while digit >= 1 do
    -- Seven bits of n at a time, so that every step is exact.
    local product = rest * 128 + floor(n / digit) % 128 * x
    quotient, rest = quotient * 128 + floor(product / d), product % d
    digit = digit / 128
  end
  return quotient, rest
end

local function policy(capacity, period)
  return { capacity = capacity, period = period }
end

local function load(policy, key, now, value)
  local period = policy.period
  if not value or #value ~= LENGTH then
    policy.expires = nil
    return now - now % period, 0, 0
  end
  local start, since, current, previous
  start, since, current, previous, policy.expires = decode(FORMAT, value)
  local last = start + since
  current, previous = min(current, 2 * policy.capacity), min(previous, 2 * policy.capacity)
  if start > now then
    return now - now % period, current, previous, true
  end
  local elapsed = now - start
  if elapsed >= period then
    local stop, later = start + period, 0
    if last >= stop then
      -- Of a window of a longer period.
      later = late(policy, current, start, last, stop)
    end
    start = now - elapsed % period
    if last >= start then
      current, previous = later, current - later
    elseif last >= start - period then
      current, previous = 0, last >= stop and later or current
    else
      current, previous = 0, 0
    end
  end
  if current == 0 and previous == 0 then
    return now - now % period, 0, 0
  end
  return start, current, previous, last > now
end

local function room(policy, now, start, current, previous)
  -- What the window before still counts, rounded up: its share that the sliding window overlaps.
  local overlap, rest = mul_div(previous, start + policy.period - now, policy.period)
  if rest > 0 then
    overlap = overlap + 1
  end
  return policy.capacity - current - overlap
end

local function wait(policy, key, now, cost, start, current, previous)
  local left = start + policy.period - now
  if current + cost <= policy.capacity then
    return left - mul_div(policy.period, policy.capacity - current - cost, previous)
  end
  -- In the next window, where this one is the one before.
  return left + policy.period - mul_div(policy.period, policy.capacity - cost, current)
end

local function charge(policy, key, now, cost, start, current, previous)
  return start, current + cost, previous
end

-- From the window of the charge: this one, or the one before.
local function refund(policy, key, now, cost, of, start, current, previous)
  local period = policy.period
  local ahead = 2 * (start + 2 * period - now - (of.reset - of.age))
  if ahead < period then
    local rest = max(0, cost - current)
    return cost, start, max(0, current - cost), max(0, previous - rest)
  elseif ahead < 3 * period then
    return min(cost, previous), start, current, max(0, previous - cost)
  end
  return 0, start, current, previous
end

local function reset(policy, now, start, current, previous)
  local left = start + policy.period - now
  if current > 0 then
    return left + policy.period
  elseif previous > 0 then
    return left
  end
  return 0
end

local function save(policy, key, now, at, cost, start, current, previous)
  local expires, text = lasting(policy.expires, at, 0)
  write(key, encode(FORMAT, start, now - start, current, previous, expires), text)
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
