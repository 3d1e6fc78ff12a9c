-- The meter: the code shared by the leaky bucket, GCRA and the token bucket, which describe one algorithm in three
-- ways. The Rust half is src/limit/strategy/meter.rs.
--
-- Stored: the time since which the meter drains; its level at that time, in ticks; expiry of the key, which the policy
-- keeps between `load` and `save`.
--
-- State: the level now, in ticks; the time since which the meter drains.
--
-- take.lua and takes.lua repeat the take of a meter inline. Change all three together.
--
-- Uses decode, encode, floor, max, min, DAY and MAX_TICKS of call.lua; div_ceil, lasting and write of prelude.lua.

local METER, METER_LENGTH = '<i7I7I5', 19
-- Precision of the end of a turn, in microseconds.
local ROUNDING = 3

local function meter()
  -- A unit of cost is `interval` ticks. If `period` is 0, `ticks` drain in every microsecond; otherwise they drain
  -- after each period.
  local function policy(capacity, interval, ticks, period)
    local full = capacity * interval
    -- The highest level: twice the capacity, or a full meter and the drain of a day, for turns taken ahead.
    local deepest = 2 * full
    if period == 0 then
      deepest = max(deepest, min(full + DAY * ticks, MAX_TICKS))
    end
    return {
      capacity = capacity,
      interval = interval,
      ticks = ticks,
      period = period,
      full = full,
      deepest = deepest,
      -- The longest wait of a turn taken ahead.
      longest = period == 0 and floor((deepest - full) / ticks) or nil,
      -- Microseconds or periods after which any level has drained.
      furthest = floor(deepest / ticks) + 1,
    }
  end

  local function load(policy, key, now, value)
    if not value or #value ~= METER_LENGTH then
      policy.expires = nil
      return 0, now
    end
    local at, level
    at, level, policy.expires = decode(METER, value)
    local period, elapsed, future = policy.period, now - at
    if elapsed < 0 then
      at, elapsed, future = now, 0, true
    elseif period == 0 and elapsed >= policy.furthest then
      return 0, now
    end
    if level > policy.deepest then
      level = policy.deepest
    end
    if period == 0 then
      level, at = level - elapsed * policy.ticks, now
    else
      local periods = min(floor(elapsed / period), div_ceil(level, policy.ticks))
      level, at = level - periods * policy.ticks, at + periods * period
    end
    if level <= 0 then
      return 0, now, nil, future
    end
    return level, at, nil, future
  end

  local function room(policy, now, level)
    local left, interval = policy.full - level, policy.interval
    return (left - left % interval) / interval
  end

  -- Returns the microseconds until `ticks` have drained.
  local function drains_in(policy, now, ticks, at)
    local count = (ticks + -ticks % policy.ticks) / policy.ticks
    if policy.period > 0 and count > 0 then
      return at + count * policy.period - now
    end
    return count
  end

  local function wait(policy, key, now, cost, level, at)
    return drains_in(policy, now, level + cost * policy.interval - policy.full, at)
  end

  local function charge(policy, key, now, cost, level, at)
    return level + cost * policy.interval, at
  end

  -- Refunds the part of a charge that still counts, or the last turn, as in the Rust half.
  local function refund(policy, key, now, cost, of, level, at)
    local period, most = policy.period, 2 * policy.capacity
    -- Under another policy, the charge may count for longer.
    if of.reset <= of.age then
      return 0, level, at
    end
    if of.turn and period == 0 then
      local ends = min(of.reset - of.age, policy.furthest) * policy.ticks
      if math.abs(level - ends) <= ROUNDING * policy.ticks then
        local ticks = min(min(cost, most) * policy.interval, level)
        return div_ceil(ticks, policy.interval), level - ticks, at
      elseif level > policy.full then
        return 0, level, at
      end
    end
    local times = min(of.age, policy.furthest)
    if period > 0 then
      local due = min(of.reset, policy.furthest * period)
      local still = floor((now + max(0, due - of.age) - at + floor(period / 2)) / period)
      times = max(0, min(div_ceil(due, period) - still, policy.furthest))
    end
    local left = min(of.cost, most) * policy.interval - times * policy.ticks
    local ticks = min(max(0, min(left, min(cost, most) * policy.interval)), level)
    return div_ceil(ticks, policy.interval), level - ticks, at
  end

  local function save(policy, key, now, stop, cost, level, at)
    local expires, text = lasting(policy.expires, stop, 1)
    write(key, encode(METER, at, level, expires), text)
  end

  return {
    policy = policy,
    load = load,
    room = room,
    wait = wait,
    charge = charge,
    refund = refund,
    reset = drains_in,
    save = save,
  }
end
