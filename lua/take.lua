-- The script of one take: decides the most frequent call of an instance with few requests, one take without an id under
-- one meter. It decides as takes.lua does, with fewer instructions: it has neither loops nor tables. Redis takes most of
-- the time for the call and its commands, so each operation here counts.
--
-- KEYS   one
-- ARGV   a string of packed doubles, which are decoded fastest: the ticks of the capacity, of the cost, and per
--          microsecond. For tests also the time in microseconds since the Unix epoch, instead of Redis's own
-- Reply  an answer of takes.lua

local METER, METER_LENGTH = '<i7I7I5', 19
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

local failures, state
if value and #value ~= METER_LENGTH then
  -- The value is another program's, or an error: GET may be denied, since no other script needs it. MGET, which all
  -- scripts use, returns no value of another type.
  value = redis_pcall('MGET', key)
  if value.err then
    failures = { err = 'MGET ' .. value.err }
  end
  value = value[1]
end
if not failures then
  local full, units, ticks = decode('<ddd', ARGV[1])
  local at, level, expires = now, 0
  if value and #value == METER_LENGTH then
    at, level, expires = decode(METER, value)
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
    if at < now then
      level = level - (now - at) * ticks
      if level < 0 then
        level = 0
      end
    end
  end

  local charged = level + units
  if charged > full or units == 0 then
    -- A denied take writes only a state whose time is in the future, as call.lua explains.
    if at <= now then
      return encode(METER, now, -1 - level, 0)
    end
    charged = level
  end
  -- Like `lasting` and `write` of prelude.lua, with the constants of call.lua.
  local reset = (charged + -charged % ticks) / ticks
  local stop, command, written = now + reset + keep, 'SET'
  if expires and (expires - stop / 1000) % 1099511627776 < 137438953472 then
    state, command = encode(METER, now, charged, expires), 'SETRANGE'
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
    state = encode(METER, now, charged, ms % 1099511627776)
    written = redis_pcall('SET', key, state, 'PXAT', text)
  end
  if written ~= METER_LENGTH and written.err then
    failures = { err = command .. ' ' .. written.err }
  elseif charged == level then
    return encode(METER, now, -1 - level, 0)
  end
end
if not failures then
  return state
end
