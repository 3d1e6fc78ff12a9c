-- The meter: what the leaky bucket and GCRA share, which say the same in two ways; the twin of
-- src/limit/strategy/meter.rs.
--
-- Stored: when the meter was filled last, its level then in ticks, and how many ticks made a unit of cost; when the key
-- expires, which the policy keeps from `load` to `save`.
-- Registers: the level at now, in ticks.
--
-- Uses decode, encode, max, METER and METER_LENGTH of call.lua; div_ceil, lasting, refill_functions and write of prelude.lua.

local function meter()
  local refilling, drained, kept = refill_functions()

  local function load(policy, key, now, value)
    if not value or #value ~= METER_LENGTH then
      policy.expires = nil
      return 0
    end
    local at, level, interval
    at, level, interval, policy.expires = decode(METER, value)
    return drained(policy, now, at, level, interval)
  end

  local function room(policy, now, level)
    local left, interval = policy.full - level, policy.interval
    return (left - left % interval) / interval
  end

  local function wait(policy, key, now, cost, level)
    return div_ceil(level + cost * policy.interval - policy.full, policy.ticks)
  end

  local function charge(policy, key, now, cost, level)
    return level + cost * policy.interval
  end

  local function refund(policy, key, now, cost, of, level)
    local ticks = kept(policy, cost, of)
    return div_ceil(ticks, policy.interval), max(0, level - ticks)
  end

  local function reset(policy, now, level)
    local ticks = policy.ticks
    return (level + -level % ticks) / ticks
  end

  local function save(policy, key, now, at, cost, level)
    local expires, text = lasting(policy.expires, at, 1)
    write(key, encode(METER, now, level, policy.interval, expires), text)
  end

  return {
    policy = refilling,
    load = load,
    room = room,
    wait = wait,
    charge = charge,
    refund = refund,
    reset = reset,
    save = save,
  }
end
