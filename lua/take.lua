-- The script of one take: decides the most frequent call of an instance with few requests, one take without an id under
-- one meter. It decides as takes.lua does, with fewer instructions: it has neither loops nor tables. Redis takes most of
-- the time for the call and its commands, so each operation here counts. Other calls are decided by
-- takes.lua, which follows: the value is of another quota, of a later clock or another program's, or a command has failed.
--
-- KEYS   one
-- ARGV   a string of packed doubles, which are decoded fastest: the ticks of the capacity, of the cost, and per
--          microsecond; then the writer of meter.lua. For tests also the time in microseconds since the Unix epoch,
--          instead of Redis's own
-- Reply  a reply of takes.lua

local METER, METER_LENGTH, OWN, OWN_LENGTH = '<i7I7I5', 19, '<i7I7I5d', 27
local key, encode, decode, redis_pcall = KEYS[1], struct.pack, struct.unpack, redis.pcall

local time, value = redis_pcall('TIME'), redis_pcall('GET', key)
if time.err then
  return time
end
local clock = time[1] * 1000000 + time[2]
local now, keep = clock, 0
if ARGV[2] then
  now = ARGV[2] + 0
  keep = clock - now + 86400000000
end

local full, units, ticks, own = decode('<dddd', ARGV[1])
local at, level, writer, expires = now, 0, own
if value then
  writer = nil
  if #value == OWN_LENGTH then
    at, level, expires, writer = decode(OWN, value)
  end
end
if writer == own and at <= now then
  if level > 2 * full then
    -- The highest level is `deepest` of meter.lua.
    local deepest = full + 86400000000 * ticks
    if deepest > 4503599627370496 then
      deepest = 4503599627370496
    end
    if deepest < 2 * full then
      deepest = 2 * full
    end
    if level > deepest then
      level = deepest
    end
  end
  level = level - (now - at) * ticks
  if level < 0 then
    level = 0
  end

  local charged = level + units
  if charged > full or units == 0 then
    return encode(METER, now, -1 - level, 0)
  end
  -- Like `lasting` and `write` of prelude.lua, with the constants of common.lua.
  local reset = (charged + -charged % ticks) / ticks
  local stop, state, written = now + reset + keep
  if expires and (expires - stop / 1000) % 1099511627776 < 137438953472 then
    state = encode(METER, now, charged, expires)
    written = redis_pcall('SETRANGE', key, '0', state)
  else
    if expires then
      stop = stop + reset
    end
    local ms = (stop + -stop % 1000) / 1000
    -- Formatting an integer is cheaper, but some servers have integers of 32 bits.
    local text = string.format('%d', ms)
    if #text ~= 13 then
      text = string.format('%.0f', ms)
    end
    local whole = encode(OWN, now, charged, ms % 1099511627776, own)
    if #ARGV[1] > 32 then
      whole = whole .. string.sub(ARGV[1], 33)
    end
    state = string.sub(whole, 1, METER_LENGTH)
    written = redis_pcall('SET', key, whole, 'PXAT', text)
  end
  if written == OWN_LENGTH or not written.err then
    return state
  end
end

local ARGV = {
  encode('<i7i7i7i7I4I4', ARGV[2] and now or 0, full, units, ticks, 1, 1) .. string.sub(ARGV[1], 25),
}
