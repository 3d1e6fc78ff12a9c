-- Sliding counter; the twin of src/limit/strategy/sliding_counter.rs, which explains it.
--
-- Stored and loaded: the time of the last charge, what was granted in its window, and what in the window before.

local FORMAT, LENGTH = '<i7i6i6', 19

-- n * x / d, rounded down, and the rest; exact also where the product is above 2^53. x is at most d, d below 2^45.
local function mul_div(n, x, d)
  if n * x < 9007199254740992 then
    return floor(n * x / d), n * x % d
  end
  local quotient, rest = 0, 0
  local digit = 4398046511104 -- 2^42
  while digit >= 1 do
    -- Seven bits of n at a time, so that no step exceeds 2^53.
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
  if not value or #value ~= LENGTH then
    return now, 0, 0
  end
  local last, current, previous = unpack(FORMAT, value)
  local future = last > now
  last = min(last, now)
  current, previous = max(0, min(current, 2 * policy.capacity)), max(0, min(previous, 2 * policy.capacity))
  local start = now - now % policy.period
  if last < start - policy.period then
    return now, 0, 0
  elseif last < start then
    return now, 0, current
  end
  return last, current, previous, future
end

-- What the window before still counts, rounded up: its share that the sliding window overlaps.
local function overlap(policy, now, previous)
  local counts, rest = mul_div(previous, policy.period - now % policy.period, policy.period)
  if rest > 0 then
    return counts + 1
  end
  return counts
end

local function room(policy, now, last, current, previous)
  return policy.capacity - current - overlap(policy, now, previous)
end

local function wait(policy, key, now, cost, last, current, previous)
  local left = policy.period - now % policy.period
  if current + cost <= policy.capacity then
    return left - mul_div(policy.period, policy.capacity - current - cost, previous)
  end
  -- In the next window, where this one is the one before.
  return left + policy.period - mul_div(policy.period, policy.capacity - cost, current)
end

-- Gives back from the current window first.
local function charge(policy, key, now, cost, last, current, previous)
  local rest = min(0, current + cost)
  return now, max(0, current + cost), max(0, previous + rest)
end

local function reset(policy, now, last, current, previous)
  local left = policy.period - now % policy.period
  if current > 0 then
    return left + policy.period
  elseif previous > 0 then
    return left
  end
  return 0
end

local function save(policy, key, now, at, cost, last, current, previous)
  write(key, pack(FORMAT, last, current, previous), at)
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
