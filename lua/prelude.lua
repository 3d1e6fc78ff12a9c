-- Shared by the strategies and the driver.
--
-- Time is Redis's own, in microseconds since the Unix epoch. All numbers are integers below 2^53, which
-- are exact in a double; so is the quotient of two such numbers, rounded down.
--
-- A strategy is a table of functions, with the names and the order of its Rust half:
--   policy(capacity, ...)
--       creates a policy for the other functions, with its `capacity` in units of cost. Further arguments
--       of a strategy that refills: ticks per unit; ticks per refill; microseconds between refills, 0 if it
--       refills every microsecond; the bytes that name the quota in a value. For a window, in microseconds: its period; its offset to the clock, -1 if
--       the first charge starts a window; the width of a cell
--   load(policy, key, now, value)
--       the state at `now`: up to three values, then whether it must be saved even if nothing is charged,
--       because its stored time is later than `now`. `value` is the string under the key, or nil
--   room(policy, now, ...)
--       the largest cost that would pass now; negative in debt
--   wait(policy, key, now, cost, ...)
--       microseconds until a cost that does not pass now would pass
--   charge(policy, key, now, cost, ...)
--       the state after charging a cost
--   written(policy, now, ...), denied(policy, now, ...)
--       of a strategy whose values name their quota: the state as if this quota had written it; the state that a denied
--       take saves, or nil
--   refund(policy, key, now, cost, of, ...)
--       the deducted units, where a part of a unit counts as one, and the new state. The cost is a part of the charge that `of` describes: its cost; its age; the `reset` of its answer;
--       whether it is a turn
--   reset(policy, now, ...)
--       microseconds until the state equals a fresh one
--   save(policy, key, now, at, cost, ...)
--       stores a state until `at`, after a cost was charged, or refunded if it is negative
--
-- Code that runs for every check divides with operators, which are cheaper than a call: n - n % d
-- rounds n down to a multiple of d, and n + -n % d rounds it up. And it passes text to commands,
-- since Redis formats a number on each use, and some versions format one with many trailing zeros
-- as 1.79e+12.

-- Returns a / b, rounded up.
local function div_ceil(a, b)
  return -floor(-a / b)
end

-- Cells: a header (a time, and the running sum before the first cell), then one record per cell,
-- oldest first: its time and the running sum up to it. Sums wrap (WRAP), so only differences are
-- valid.
local CELL, CELL_LENGTH = '<i7I5', 12
-- Returns the functions `search`, `cells_in`, `cell`, `sum_to`, `up_to`, `after` and `take_out`.
local function cell_functions()
  -- Finds where `test` changes between the places `near` and `far`: returns two adjacent places,
  -- with `test` false at the first and true at the second. Assumes it false at `near` and true at
  -- `far`. Steps from `near` with doubling steps, then bisects, so the number of tests grows with
  -- the logarithm of the distance.
  local abs = math.abs
  local function search(near, far, test)
    local step = 1
    while abs(far - near) > 1 do
      local ahead = min(step, floor(abs(far - near) / 2))
      local place = far > near and near + ahead or near - ahead
      if test(place) then
        far, step = place, math.huge
      else
        near, step = place, 2 * step
      end
    end
    return near, far
  end

  -- Returns the number of cells in a string; 0 if it is not made of cells.
  local function cells_in(cells)
    local count = cells and #cells / CELL_LENGTH - 1 or 0
    return count >= 1 and count % 1 == 0 and count or 0
  end

  -- Returns the time of the cell at a place, counted from 1, and the running sum up to it. The
  -- header is at 0.
  local function cell(cells, place)
    return decode(CELL, cells, 1 + CELL_LENGTH * place)
  end

  -- Returns the sum of the cells up to a place.
  local function sum_to(cells, place)
    local _, base = cell(cells, 0)
    local _, total = cell(cells, place)
    return (total - base) % WRAP
  end

  -- Returns the header and the cells up to a place.
  local function up_to(cells, place)
    return sub(cells, 1, CELL_LENGTH * (place + 1))
  end

  -- Returns the cells after a place.
  local function after(cells, place)
    return sub(cells, 1 + CELL_LENGTH * (place + 1))
  end

  -- Removes the `cost` units after the first `start` units from the cells. Drops cells
  -- that become empty.
  local function take_out(cells, start, cost)
    local count, _, base = #cells / CELL_LENGTH - 1, cell(cells, 0)
    local before = search(0, count + 1, function(place)
      return sum_to(cells, place) > start
    end)
    local kept, sum = { up_to(cells, before) }, sum_to(cells, before)
    for place = before + 1, count do
      local time, total = cell(cells, place)
      local rest = max(start, (total - base) % WRAP - cost)
      if rest > sum then
        kept[#kept + 1], sum = encode(CELL, time, (base + rest) % WRAP), rest
      end
    end
    return table.concat(kept)
  end

  return search, cells_in, cell, sum_to, up_to, after, take_out
end

-- The id of the slot that the current check takes, renews or releases.
local slot

-- The first error of the current check: a command and Redis's error, or nil.
local first_error

-- Records the error if a reply is one, which fails the current check. Returns whether the reply is
-- an error.
local function record_error(reply, command)
  if type(reply) == 'table' and reply.err then
    first_error = first_error or command .. ' ' .. reply.err
    return true
  end
  return false
end

-- Calls a command and returns its reply. On an error, fails the current check and returns nil.
local function try(...)
  local reply = redis_pcall(...)
  return not record_error(reply, (...)) and reply or nil
end

-- Reads some keys of the call, in order; a value is nil if the key does not exist or is not a
-- string.
local function read(first, last)
  local values = redis_pcall('MGET', unpack(KEYS, first, last))
  if values.err then
    record_error(values, 'MGET')
    return {}
  end
  return values
end

-- Returns the first millisecond at which a state that is fresh at the microsecond `at` may be
-- dropped, as text. Cached, since the keys of a call often share it.
local last_ms, last_text
local function expiry(at)
  local ms = (at + -at % 1000) / 1000
  if ms ~= last_ms then
    -- Formatting an integer is cheaper, but some servers have integers of 32 bits.
    last_ms, last_text = ms, string.format('%d', ms)
    if #last_text ~= 13 then
      last_text = string.format('%.0f', ms)
    end
  end
  return last_text
end

-- A state may end with its key's expiry in milliseconds, modulo WRAP. If that expiry is
-- late enough, the next state is written in place, which keeps the expiry and costs a third as
-- much. To make this more frequent, the key of a returning caller expires later than needed.
--
-- A write in place would create a missing key, without an expiry. But a key that this call has read
-- exists: no key expires or is evicted while a script runs.

-- Returns the expiry of the key of a state that counts until `at`. If the current expiry is late
-- enough, keeps it. Otherwise it is `at`; for an existing key it is later by `slack` times the
-- remaining time of the state. Then also returns the expiry as text.
local function lasting(expires, at, slack)
  if expires then
    if (expires - at / 1000) % WRAP < LONGEST then
      return expires
    end
    at = at + slack * (at - keep - now)
  end
  local text = expiry(at)
  return last_ms % WRAP, text
end

-- Stores bytes under a key with the expiry `text`, and remembers both. Without `text` (`lasting`
-- has returned none), writes the state in place.
local written, written_text
local function write(key, value, text)
  if text then
    written, written_text = value, text
    local reply = redis_pcall('SET', key, value, 'PXAT', text)
    if reply.err then
      record_error(reply, 'SET')
    end
    return
  end
  local reply = redis_pcall('SETRANGE', key, '0', value)
  if reply ~= #value then
    record_error(reply, 'SETRANGE')
  end
end

-- Records that the results between two places of the reply have failed.
local function fail(from, to)
  failures = { from = from, to = to, err = first_error, before = failures }
end

-- Repeats the last result of `numbers` values, which ends at the place `to` of the reply: a denial
-- holds until the time changes. Returns the new end.
local function repeat_last(to, numbers, times)
  for i = to + 1, to + numbers * times do
    reply[i] = reply[i - numbers]
  end
  return to + numbers * times
end

-- The strategies by number, including the one for requests in flight. This call only creates the ones that
-- it uses, below.
local strategies = {}
for i = 2, 1 + policy_count do
  strategies[byte(ARGV[i])] = true
end
