-- What is asked most: takes without an id under one policy, a meter that drains in every microsecond. They are decided just as
-- check.lua and meter.lua decide them, which explain it, but in one go: to make functions anew for each call and to call them
-- for each check would take as long as all the rest.
--
-- Uses all of call.lua, and the numbers of modes and strategies.

-- All states are read at once: under one plan no key comes twice.
local usual, zero = plan_count == 1 and #KEYS <= MOST, '\0\0\0\0\0\0\0'
for i = 2, 1 + policy_count do
  local strategy = byte(ARGV[i])
  -- A token bucket has no period then.
  local is_greedy = strategy == token_bucket and sub(ARGV[i], 23) == zero
  usual = usual and (strategy == gcra or strategy == leaky_bucket or is_greedy)
end
for i = 2 + policy_count, 1 + policy_count + plan_count do
  local text = ARGV[i]
  usual = usual and byte(text) == TAKE and #text == PLAN_LENGTH + NUMBER_LENGTH and sub(text, 6, PLAN_LENGTH) == zero
end
local values = usual and redis_pcall('MGET', unpack(KEYS))
usual = usual and not values.err

if usual then
  local n = 0
  for i = 2 + policy_count + plan_count, #ARGV do
    local number, entries, times = decode(RUN, ARGV[i])
    local text = ARGV[1 + policy_count + number]
    local _, cost, _, rest = decode(PLAN, text)
    local _, capacity, interval, ticks = decode(POLICY, ARGV[1 + decode(NUMBER, text, rest)])
    local full, units = capacity * interval, cost * interval
    local deepest = max(2 * full, min(full + DAY * ticks, MAX_TICKS))
    local furthest = floor(deepest / ticks) + 1
    -- What was packed last: of callers without a state all are charged alike.
    local last_level, last_ms, last_text, last_state

    for place = key_at + 1, key_at + entries do
      local value, level, expires, future = values[place], 0
      if value and #value == METER_LENGTH then
        local at
        at, level, expires = decode(METER, value)
        local elapsed = now - at
        if elapsed >= furthest then
          level = 0
        else
          if level > deepest then
            level = deepest
          end
          if elapsed < 0 then
            future = true
          else
            level = level - elapsed * ticks
            if level < 0 then
              level = 0
            end
          end
        end
      end

      local from, granted, reset = n, 0
      local room = full - level
      room = (room - room % interval) / interval
      for time = 1, times do
        local charged, wait = 0, 0
        if cost > capacity then
          wait = -1
        elseif room < cost then
          wait = -floor(-(level + units - full) / ticks)
        else
          charged, granted, room, level = cost, granted + cost, room - cost, level + units
        end
        reset = (level + -level % ticks) / ticks
        reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = charged, room > 0 and room or 0, wait, reset
        n = n + 4
      end

      if granted > 0 or future then
        local key, at, command, written = KEYS[place], now + reset + keep, 'SET'
        if expires and (expires - at / 1000) % WRAP < LONGEST then
          command = 'SETRANGE'
          written = redis_pcall('SETRANGE', key, '0', encode(METER, now, level, expires))
        else
          if expires then
            at = at + reset
          end
          local ms = (at + -at % 1000) / 1000
          if ms ~= last_ms or level ~= last_level then
            last_level, last_ms, last_text = level, ms, string.format('%.0f', ms)
            last_state = encode(METER, now, level, ms % WRAP)
          end
          written = redis_pcall('SET', key, last_state, 'PXAT', last_text)
        end
        if written ~= METER_LENGTH and written.err then
          failures = { from = from, to = n, err = command .. ' ' .. written.err, before = failures }
        end
      end
    end
    key_at = key_at + entries
  end
  replied = n
end
