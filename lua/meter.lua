-- The meter: the code shared by the leaky bucket, GCRA and the token bucket, which describe one algorithm in three
-- ways. The Rust half is src/limit/strategy/meter.rs, which explains changed quotas.
--
-- Stored: the time since which the meter drains; its level at that time, in ticks of the quota that wrote it; expiry of
-- the key; that quota, the writer, in 8 or 16 bytes (src/limit/strategy/writer.rs). After a change of the writer also the
-- fastest rate of the earlier ones as a double, or the time of the change for a meter that drains after each period; and
-- the time until which a charge under them may be refunded.
--
-- Between `load` and `save`, the policy keeps the expiry, and for a level that another quota wrote, its numbers.
--
-- State: the level now, in ticks; the time since which the meter drains; whether this quota wrote the level.
--
-- take.lua and takes.lua repeat the take of a meter inline. Change all three together.
--
-- Uses decode, encode, byte, sub, ceil, floor, max, min, DAY, MAX_TICKS, WRAP and LONGEST of call.lua; div_ceil, lasting,
-- try and write of prelude.lua.

local METER, METER_LENGTH = '<i7I7I5', 19
-- The short form of a writer, the long one, and the part after it if the writer has changed.
local WRITER_LENGTH, LONG_WRITER_LENGTH = 8, 16
local CHANGED, CHANGED_LENGTH = '<di7', 15
-- Precision of the end of a turn, in microseconds.
local ROUNDING = 3
-- The writer of the level: this quota; another one, under which this one is not faster; another one, under which it is.
local OWN, SLOWER, FASTER = nil, 1, 2

local function meter()
  -- A unit of cost is `interval` ticks. If `period` is 0, `ticks` drain in every microsecond; otherwise they drain
  -- after each period. `writer` are the bytes that name the quota in a value.
  local function policy(capacity, interval, ticks, period, writer)
    local full = capacity * interval
    -- The highest level that only this quota has charged: twice the capacity, or a full meter and the drain of a day, for
    -- turns taken ahead. Another quota may have charged up to `highest`.
    local deepest, highest = 2 * full, MAX_TICKS
    if period == 0 then
      deepest = max(deepest, min(full + DAY * ticks, MAX_TICKS))
    else
      highest = min(floor(MAX_TICKS / period) * ticks, MAX_TICKS)
    end
    return {
      capacity = capacity,
      interval = interval,
      ticks = ticks,
      period = period,
      writer = writer,
      -- Units that drain in a microsecond.
      rate = ticks / (period == 0 and interval or period),
      full = full,
      deepest = deepest,
      highest = highest,
      -- The longest wait of a turn taken ahead.
      longest = period == 0 and floor((deepest - full) / ticks) or nil,
      -- Microseconds or periods after which any level has drained.
      furthest = floor(deepest / ticks) + 1,
    }
  end

  -- Returns the bytes in a value that name its writer, and the rest of the value. Returns nil if it is no meter's.
  local function writer_of(value)
    local tag = byte(value, METER_LENGTH + WRITER_LENGTH) or 255
    local stop = METER_LENGTH + (tag == 0 and LONG_WRITER_LENGTH or WRITER_LENGTH)
    local first, second = floor(tag / 8), tag % 8
    local is_valid = tag == 0 or first > 0 and second > 0 and first + second < 7
    if is_valid and (#value == stop or #value == stop + CHANGED_LENGTH) then
      return sub(value, METER_LENGTH + 1, stop), sub(value, stop + 1)
    end
  end

  -- Returns the writer as a policy, from its bytes. Returns nil for other bytes.
  local function policy_of(writer, period)
    local tag = byte(writer, WRITER_LENGTH)
    local interval, ticks, capacity, zeros
    if tag == 0 then
      interval, zeros, ticks, capacity = decode('<I6I2I4I4', writer)
    else
      local first, second = floor(tag / 8), tag % 8
      interval, ticks, capacity = decode('<I' .. first .. 'I' .. second .. 'I' .. 7 - first - second, writer)
    end
    if interval == 0 or ticks == 0 or capacity == 0 then
      return nil
    elseif period > 0 then
      interval, period = 1, interval
    end
    if capacity * interval > MAX_TICKS / 2 then
      return nil
    end
    return policy(capacity, interval, ticks, period, writer)
  end

  -- Returns the fastest rate of the earlier writers, or the time of the last change, and the time until which their
  -- charges may be refunded. Returns nil if none may.
  local function changed(policy, now)
    if policy.tail ~= '' then
      local mark, stop = decode(CHANGED, policy.tail)
      if stop > now then
        return mark, stop
      end
    end
  end

  -- Returns the level now, and the time since which it drains, of a level at a time, under the policy that wrote it.
  -- `highest` is the highest level that it may have.
  local function drained(policy, now, at, level, highest)
    local period, elapsed = policy.period, now - at
    if elapsed < 0 then
      highest, at, elapsed = policy.deepest, now, 0
    end
    level = min(level, highest)
    if period == 0 then
      level, at = level - elapsed * policy.ticks, now
    else
      local periods = min(floor(elapsed / period), div_ceil(level, policy.ticks))
      level, at = level - periods * policy.ticks, at + periods * period
    end
    if level <= 0 then
      return 0, now
    end
    return level, at
  end

  -- Converts ticks of a quota whose unit has `from` ticks to ticks of a quota whose unit has `to`. Rounds up.
  local function convert(level, from, to)
    if from == to then
      return level
    end
    local rest = level % from
    local units = (level - rest) / from
    -- So that no product reaches 2^53.
    local scale = div_ceil(from, 2 ^ 32)
    local parts = min(div_ceil(div_ceil(rest, scale) * 2 ^ 20, floor(from / scale)), 2 ^ 20)
    local low = to % 2 ^ 20
    return min(units * to + parts * (to - low) / 2 ^ 20 + div_ceil(parts * low, 2 ^ 20), MAX_TICKS)
  end

  -- Returns the microseconds until `ticks` have drained.
  local function drains_in(policy, now, ticks, at)
    local count = (ticks + -ticks % policy.ticks) / policy.ticks
    if policy.period > 0 and count > 0 then
      return at + count * policy.period - now
    end
    return count
  end

  -- Returns the registers as if this quota had written the level.
  local function written(policy, now, level, at, by)
    if by ~= OWN and policy.period > 0 then
      -- A started interval counts for one refill at most, which is due after this check.
      at = max(at, now - policy.period + 1)
    end
    return level, at, OWN
  end

  local function load(policy, key, now, value)
    -- For `save`: `by` is the policy of another writer, with its `level` and `since`.
    policy.expires, policy.by, policy.tail, policy.is_written = nil, nil, '', false
    local writer, tail
    if value then
      writer, tail = writer_of(value)
    end
    if not writer then
      return 0, now
    end
    local at, level, expires = decode(METER, value)
    local other = policy
    if writer ~= policy.writer then
      other = policy_of(writer, policy.period)
      if not other then
        return 0, now
      end
    end
    local future = at > now
    policy.expires, policy.tail, policy.is_written = expires, tail, other == policy
    level, at = drained(other, now, at, level, changed(policy, now) and other.highest or other.deepest)
    if other == policy then
      return level, at, OWN, future
    end
    policy.by, other.level, other.since = other, level, at
    if level == 0 then
      return 0, now, OWN, future
    end
    if policy.period == 0 then
      level = convert(level, other.interval, policy.interval)
    end
    if policy.rate <= other.rate then
      return level, at, SLOWER, future
    end
    level, at = written(policy, now, level, at, FASTER)
    return level, at, FASTER, future
  end

  local function room(policy, now, level)
    local left, interval = policy.full - level, policy.interval
    return (left - left % interval) / interval
  end

  -- Returns the microseconds until no more than these units are used, at the rate of the writer.
  local function writers_wait(policy, now, units)
    local by = policy.by
    return drains_in(by, now, max(0, by.level - units * by.interval), by.since)
  end

  local function wait(policy, key, now, cost, level, at, by)
    if by == SLOWER then
      return writers_wait(policy, now, policy.capacity - cost)
    end
    return drains_in(policy, now, level + cost * policy.interval - policy.full, at)
  end

  -- Returns the registers that a denied take saves. Returns nil unless its quota is faster.
  local function denied(policy, now, level, at, by)
    -- A level that was lowered to the highest one would free used units under the writer.
    if by == FASTER and level < policy.highest then
      return written(policy, now, level, at, by)
    end
  end

  local function charge(policy, key, now, cost, level, at, by)
    level, at = written(policy, now, level, at, by)
    return level + cost * policy.interval, at, OWN
  end

  -- Returns the ticks that have drained since a charge under this quota.
  local function drained_since(policy, now, of, at)
    local period, times = policy.period, min(of.age, policy.furthest)
    if period > 0 then
      local due = min(of.reset, policy.furthest * period)
      local still = floor((now + max(0, due - of.age) - at + floor(period / 2)) / period)
      times = max(0, min(div_ceil(due, period) - still, policy.furthest))
    end
    return times * policy.ticks
  end

  -- Returns those ticks if the writer has changed since: at the fastest rate that may have drained them.
  local function drained_by_any(policy, now, of, at, by, mark)
    if policy.period > 0 then
      if by ~= OWN or mark and now - of.age < mark then
        return MAX_TICKS
      end
      return drained_since(policy, now, of, at)
    end
    local fastest = mark or 0
    if by ~= OWN then
      fastest = max(fastest, policy.by.rate)
    end
    if fastest <= policy.rate then
      return drained_since(policy, now, of, at)
    end
    return min(ceil(of.age * fastest * policy.interval) + 1, MAX_TICKS)
  end

  -- Refunds the part of a charge that still counts, or the last turn, as in the Rust half.
  local function refund(policy, key, now, cost, of, level, at, by)
    local most = 2 * policy.capacity
    -- Under another policy, the charge may count for longer.
    if of.reset <= of.age then
      return 0, level, at, by
    end
    local mark = changed(policy, now)
    local has_changed, is_turn = by ~= OWN or mark, of.turn and policy.period == 0
    local part, left = min(cost, most) * policy.interval, nil
    if is_turn and not has_changed then
      local ends = min(of.reset - of.age, policy.furthest) * policy.ticks
      if math.abs(level - ends) <= ROUNDING * policy.ticks then
        left = part
      end
    end
    if not left and is_turn and level > policy.full then
      left = 0
    elseif not left then
      local gone
      if has_changed then
        gone = drained_by_any(policy, now, of, at, by, mark)
      else
        gone = drained_since(policy, now, of, at)
      end
      left = max(0, min(min(of.cost, most) * policy.interval - gone, part))
    end
    local ticks = min(left, level)
    local units = div_ceil(ticks, policy.interval)
    level = level - ticks
    if by ~= OWN and ticks > 0 then
      -- The writer stays, and the level is in its ticks.
      local other = policy.by
      other.level = min(other.level, convert(level, policy.interval, other.interval))
      level = convert(other.level, other.interval, policy.interval)
    end
    return units, level, at, by
  end

  local function reset(policy, now, level, at, by)
    if by == SLOWER then
      return writers_wait(policy, now, 0)
    end
    return drains_in(policy, now, level, at)
  end

  -- Returns what follows the writer after another one has written.
  local function tail_after(policy, now)
    local by, mark, stop = policy.by, changed(policy, now)
    local fastest, ends = by.rate, now + drains_in(by, now, by.level, by.since)
    if mark then
      fastest, ends = max(fastest, mark), max(ends, stop)
    end
    if ends <= now then
      return ''
    end
    return encode(CHANGED, policy.period > 0 and now or fastest, ends)
  end

  local function save(policy, key, now, stop, cost, level, at, by)
    local writer, tail, is_same = policy.writer, policy.tail, policy.is_written
    if by ~= OWN then
      local other = policy.by
      writer, level, at, is_same = other.writer, other.level, other.since, true
      stop = now + drains_in(other, now, level, at) + keep
    elseif not is_same and policy.by then
      tail = tail_after(policy, now)
    elseif tail ~= '' and not changed(policy, now) then
      -- take.lua and takes.lua decide only values without it.
      tail, is_same = '', false
    end
    local expires, text = lasting(policy.expires, stop, 1)
    local state = encode(METER, at, level, expires)
    if is_same and not text then
      write(key, state)
    elseif text then
      write(key, state .. writer .. tail, text)
    else
      -- The key expires late enough, but the length may change.
      try('SET', key, state .. writer .. tail, 'KEEPTTL')
    end
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
    written = written,
    denied = denied,
    policy_of = policy_of,
    is_of_another = function(by)
      return by ~= OWN
    end,
  }
end
