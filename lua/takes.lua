-- The script of takes: decides a call of takes without an id under one meter each, with no caller twice. take.lua decides
-- a call of a single take. Both decide exactly as the script of checks with meter.lua does, and read and write the same
-- states.
--
-- KEYS   one for each entry
-- ARGV   one string of packed numbers for each run of entries under one policy and with one cost: the time in
--          microseconds since the Unix epoch, for tests, or 0 for Redis's own; the ticks of the capacity, of the cost,
--          and per microsecond; the number of entries; the number of takes of each entry
-- Reply  a string of three integers for each entry, of 7, 7 and 5 bytes:
--          time            of the call, in microseconds; if negative, a problem (see problem.lua)
--          level           in ticks, after a single take that was charged; otherwise -1 minus the level before all takes
--          expiry          of the key, if a single take was charged
--        So the answer to a charged take is the stored state. The client computes the verdicts from the level.
--
-- Redis runs the whole script for each call, and creating functions and tables takes time: this script creates neither.

local METER, METER_LENGTH = '<i7I7I5', 19
local KEYS, encode, decode, redis_pcall = KEYS, struct.pack, struct.unpack, redis.pcall

local time = redis_pcall('TIME')
if time.err then
  return time
end
local clock = time[1] * 1000000 + time[2]

-- The states. Each is replaced with its answer.
local answers, failures = redis_pcall('MGET', unpack(KEYS))
if answers.err then
  failures = { from = 1, to = #KEYS, err = 'MGET ' .. answers.err }
end
local place = 0
-- The last written state: new callers often get equal states.
local last_ms, last_text, last_level, last_state
for run = 1, failures and 0 or #ARGV do
  local now, full, units, ticks, entries, times = decode('<i7i7i7i7I4I4', ARGV[run])
  -- Redis expires keys by its own time. Under another time they are kept for a day longer than needed.
  local keep = 0
  if now == 0 then
    now = clock
  else
    keep = clock - now + 86400000000
  end
  for _ = 1, entries do
    place = place + 1
    local value, level, expires, future = answers[place], 0
    if value and #value == METER_LENGTH then
      local at
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
      if at > now then
        future = true
      else
        level = level - (now - at) * ticks
        if level < 0 then
          level = 0
        end
      end
    end

    local charged = level
    for _ = 1, times do
      if charged + units > full then
        break
      end
      charged = charged + units
    end
    local state
    if charged > level or future then
      local reset = (charged + -charged % ticks) / ticks
      local at, command, written = now + reset + keep, 'SET'
      -- Like `lasting` and `write` of prelude.lua, with the constants of call.lua.
      if expires and (expires - at / 1000) % 1099511627776 < 137438953472 then
        state, command = encode(METER, now, charged, expires), 'SETRANGE'
        written = redis_pcall('SETRANGE', KEYS[place], '0', state)
      else
        if expires then
          at = at + reset
        end
        local ms = (at + -at % 1000) / 1000
        if ms ~= last_ms or charged ~= last_level then
          -- Formatting an integer is cheaper, but some servers have integers of 32 bits.
          last_ms, last_text = ms, string.format('%d', ms)
          if #last_text ~= 13 then
            last_text = string.format('%.0f', ms)
          end
          last_level, last_state = charged, encode(METER, now, charged, ms % 1099511627776)
        end
        state = last_state
        written = redis_pcall('SET', KEYS[place], state, 'PXAT', last_text)
      end
      if written ~= METER_LENGTH and written.err then
        failures = { from = place, to = place, err = command .. ' ' .. written.err, before = failures }
      end
    end
    if times > 1 or charged == level then
      state = encode(METER, now, -1 - level, 0)
    end
    answers[place] = state
  end
end
if not failures then
  return table.concat(answers)
end
