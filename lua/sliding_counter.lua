-- Sliding counter. The Rust half, src/limit/strategy/sliding_counter.rs, explains the algorithm.
--
-- Stored: start of the last charge's window; amounts granted in it and in the window before; expiry of the
-- key, which the policy keeps between `load` and `save`.
--
-- State: start of the current window, the amount granted in it, and the amount granted in the window before.
--
-- Uses decode, encode, floor, max and min of call.lua; lasting and write of prelude.lua.

local FORMAT, LENGTH = '<i7I5I5I5', 22

-- Integers below this are exact in a double.
local EXACT = 2 ^ 53

-- Returns n * x / d, rounded down, and the remainder, even if the product is not exact. Requires x
-- <= d < 2^45.
local function mul_div(n, x, d)
  if n * x < EXACT then
    return floor(n * x / d), n * x % d
  end
  local quotient, rest = 0, 0
  local digit = 2 ^ 42
  while digit >= 1 do
    -- Process seven bits of n at a time, so that every step is exact.
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
  local start = now - now % policy.period
  if not value or #value ~= LENGTH then
    policy.expires = nil
    return start, 0, 0
  end
  local begun, current, previous
  begun, current, previous, policy.expires = decode(FORMAT, value)
  if begun >= start then
    return start, current, previous, begun > start
  elseif begun >= start - policy.period then
    return start, 0, current
  end
  return start, 0, 0
end

local function room(policy, now, start, current, previous)
  -- The part of the previous window that the sliding window overlaps, rounded up.
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
  -- The wait ends in the next window, in which the current window is the previous one.
  return left + policy.period - mul_div(policy.period, policy.capacity - cost, current)
end

local function charge(policy, key, now, cost, start, current, previous)
  return start, current + cost, previous
end

-- Refunds to the window of the charge: the current one, or the one before.
local function refund(policy, key, now, cost, of, start, current, previous)
  local period = policy.period
  local ahead = 2 * (start + 2 * period - now - (of.reset - of.age))
  if ahead < period then
    local rest = max(0, cost - current)
    return min(cost, current + previous), start, max(0, current - cost), max(0, previous - rest)
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
  write(key, encode(FORMAT, start, current, previous, expires), text)
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
