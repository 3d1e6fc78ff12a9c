-- The script of takes: decides a call of takes without an id under one meter each, with no caller twice. take.lua decides
-- a call of a single take. Both decide exactly as the script of checks with meter.lua does, and read and write the same
-- states. Values of other quotas, which are few, are left to changed.lua.
--
-- KEYS   one for each entry
-- ARGV   one string of packed numbers for each run of entries under one policy and with one cost: the time in
--          microseconds since the Unix epoch, for tests, or 0 for Redis's own; the ticks of the capacity, of the cost,
--          and per microsecond; the number of entries; the number of takes of each entry; then the writer of meter.lua
-- Reply  a string of three integers for each entry, of 7, 7 and 5 bytes:
--          time            of the call, in microseconds; if negative, a problem (see problem.lua)
--          level           in ticks, after a single take that was charged; otherwise -1 minus the level before all takes
--          number          of the times of this entry, counted from 1, if nothing was charged and another quota is still
--                          the writer. Otherwise of no meaning: the answer to a charged take is the start of the stored
--                          state
--        The client computes the verdicts from the level. For numbered entries, three more integers follow at the end, of
--        the same lengths:
--          wait            microseconds until the cost would be allowed
--          reset           microseconds until no charge counts
--          -               0
--
-- Redis runs the whole script for each call, and creating functions and tables takes time: this part creates neither.

local METER, METER_LENGTH, OWN, OWN_LENGTH = '<i7I7I5', 19, '<i7I7I5d', 27
local RUN, RUN_LENGTH = '<i7i7i7i7I4I4d', 36
local KEYS, encode, decode, redis_pcall = KEYS, struct.pack, struct.unpack, redis.pcall

local time = redis_pcall('TIME')
if time.err then
  return time
end
local clock = time[1] * 1000000 + time[2]
-- Redis expires keys by its own time. Under another time they are kept for a day longer than needed.
local now, keep = clock, 0

-- The states. Each is replaced with its answer.
local answers, failures = redis_pcall('MGET', unpack(KEYS))
if answers.err then
  failures = { from = 1, to = #KEYS, err = 'MGET ' .. answers.err }
end
-- The entries for changed.lua, as a linked list: the place, and the number of the run.
local changed
local place = 0
-- The last written state: new callers often get equal states.
local last_ms, last_text, last_level, last_state, last_own, last_value
for run = 1, failures and 0 or #ARGV do
  local at, full, units, ticks, entries, times, own = decode(RUN, ARGV[run])
  if at ~= 0 then
    now, keep = at, clock - at + 86400000000
  end
  for _ = 1, entries do
    place = place + 1
    local value, level, writer, expires, future = answers[place], 0, own
    if value then
      writer = nil
      if #value == OWN_LENGTH then
        at, level, expires, writer = decode(OWN, value)
      end
    end
    if writer ~= own then
      changed = { place = place, run = run, before = changed }
    else
      if expires then
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
        local stop, command, written = now + reset + keep, 'SET'
        -- Like `lasting` and `write` of prelude.lua, with the constants of common.lua.
        if expires and (expires - stop / 1000) % 1099511627776 < 137438953472 then
          state, command = encode(METER, now, charged, expires), 'SETRANGE'
          written = redis_pcall('SETRANGE', KEYS[place], '0', state)
        else
          if expires then
            stop = stop + reset
          end
          local ms = (stop + -stop % 1000) / 1000
          if ms ~= last_ms or charged ~= last_level then
            -- Formatting an integer is cheaper, but some servers have integers of 32 bits.
            last_ms, last_text = ms, string.format('%d', ms)
            if #last_text ~= 13 then
              last_text = string.format('%.0f', ms)
            end
            last_level, last_state = charged, encode(METER, now, charged, ms % 1099511627776)
            last_own = nil
          end
          if last_own ~= run then
            last_own, last_value = run, last_state .. string.sub(ARGV[run], RUN_LENGTH + 1)
          end
          state = last_state
          written = redis_pcall('SET', KEYS[place], last_value, 'PXAT', last_text)
        end
        if written ~= OWN_LENGTH and written.err then
          failures = { from = place, to = place, err = command .. ' ' .. written.err, before = failures }
        end
      end
      if times > 1 or charged == level then
        state = encode(METER, now, -1 - level, 0)
      end
      answers[place] = state
    end
  end
end
if not (failures or changed) then
  return table.concat(answers)
end
