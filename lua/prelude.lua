-- The prelude: what the strategies and the driver share.
--
-- Time is Redis's own, in whole microseconds since the Unix epoch. All numbers are whole and below 2^53, where a
-- double is exact; the quotient of two such numbers, rounded down, is exact too.
--
-- A strategy is a table of functions, with the names and the order of its Rust half:
--   policy(capacity, ...)                     a policy, as the other functions take it. What refills is told the capacity, in
--                                             units of cost; how many ticks make a unit; how many ticks come at a time; and
--                                             after how many microseconds they come: 0, in every one. A window is told the
--                                             capacity; its period; when windows of the clock begin, -1 if a first charge
--                                             begins one; and the width of a cell; these three in microseconds. A policy has
--                                             its `capacity`
--   load(policy, key, now, value)             a state as it is now: up to three values, then whether it must be saved even
--                                             if nothing is charged, because it is of a time to come. `value` is the
--                                             string under the key, or nothing
--   room(policy, now, ...)                    the largest cost that would pass now; below 0 in debt
--   wait(policy, key, now, cost, ...)         microseconds until a cost would pass that does not now
--   charge(policy, key, now, cost, ...)       the state with a cost counted
--   refund(policy, key, now, cost, of, ...)  how much of a cost was refunded, rounded up, and the state then; `of` is
--                                             the charge of which it is a part: its cost and age, and the reset told then
--   reset(policy, now, ...)                   microseconds until the state is as if nothing had been charged
--   save(policy, key, now, at, cost, ...)     stores a state until `at`, in which a cost was charged, or refunded if it is
--                                             below 0
--
-- What runs for every check divides by operators, which cost less than a call: n - n % d is a multiple of d, rounded down,
-- and n + -n % d one rounded up. And it passes text to commands: Redis prints each number anew, and some versions of it print
-- one that ends in many zeros as 1.79e+12.

-- a / b, rounded up.
local function div_ceil(a, b)
  return -floor(-a / b)
end

-- For what is kept in order, as cells: a header, of a time and of the sum of all that was before; then for each cell, oldest
-- first, a time and the sum of all up to it. Sums are kept without their upper bytes, so only differences count.
local CELL, CELL_LENGTH = '<i7I5', 12
-- Makes `search`, `cells_in`, `cell`, `sum_to`, `up_to`, `after` and `take_out`.
local function cell_functions()
  -- Two neighbours between the places `near` and `far`, where `test` is true of the second, and of `far`, but neither of the
  -- first nor of `near`. Asks near `near` first, then by halves: how often grows with the logarithm of the distance.
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

  -- How many cells a string has; 0 if it cannot be cells.
  local function cells_in(cells)
    local count = cells and #cells / CELL_LENGTH - 1 or 0
    return count >= 1 and count % 1 == 0 and count or 0
  end

  -- The time of the cell at a place, the first being 1, and the sum up to it. At 0 is the header.
  local function cell(cells, place)
    return decode(CELL, cells, 1 + CELL_LENGTH * place)
  end

  -- The sum of what is in the cells, up to a place.
  local function sum_to(cells, place)
    local _, base = cell(cells, 0)
    local _, total = cell(cells, place)
    return (total - base) % WRAP
  end

  -- The cells up to a place, with their header.
  local function up_to(cells, place)
    return sub(cells, 1, CELL_LENGTH * (place + 1))
  end

  -- The cells after a place.
  local function after(cells, place)
    return sub(cells, 1 + CELL_LENGTH * (place + 1))
  end

  -- The cells without so many of their units: those after the first `start`. What has none left is dropped.
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

-- The id of the slot that the check at hand takes, renews or releases.
local slot

-- The first failure of the present check: a command and the error of Redis, or nothing.
local trouble

-- Notes the error in the reply to a command, if it is one: the check at hand fails. Returns whether it is none.
local function good(reply, command)
  if type(reply) == 'table' and reply.err then
    trouble = trouble or command .. ' ' .. reply.err
    return false
  end
  return true
end

-- Calls a command. If Redis refuses it, the check at hand fails, and nothing is returned.
local function try(...)
  local reply = redis_pcall(...)
  return good(reply, (...)) and reply or nil
end

-- The strings under some of the keys of the call, in their order; nothing for one that does not exist or is no string.
local function read(first, last)
  local values = redis_pcall('MGET', unpack(KEYS, first, last))
  if values.err then
    good(values, 'MGET')
    return {}
  end
  return values
end

-- The first millisecond in which a state that is fresh at a microsecond says nothing any more, as text. The keys of a call
-- often share it.
local last_ms, last_text
local function expiry(at)
  local ms = (at + -at % 1000) / 1000
  if ms ~= last_ms then
    last_ms, last_text = ms, string.format('%.0f', ms)
  end
  return last_text
end

-- A state may end with the millisecond in which its key expires, without its upper bytes. Then the next one is written in place
-- if the key lives for as long: that leaves the expiry alone, and costs a third as much. So that this is often so, the key of a
-- caller who comes again is given longer than it needs.
--
-- What writes in place would make a key that is missing, without an expiry. But a key that this call has read is there: while a
-- script runs none expires, and none is evicted.

-- When the key of a state that counts until `at` expires: as before, if that is late enough. Otherwise then, or, of a key that
-- there is, later by `slack` times as long as its state counts; the second is that time as text.
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

-- Stores bytes under a key until the time that `expiry` has returned, and remembers both. Without a time it writes a state in
-- place, for which `lasting` has returned none.
local written, written_text
local function write(key, value, text)
  if text then
    written, written_text = value, text
    local reply = redis_pcall('SET', key, value, 'PXAT', text)
    if reply.err then
      good(reply, 'SET')
    end
    return
  end
  local reply = redis_pcall('SETRANGE', key, '0', value)
  if reply ~= #value then
    good(reply, 'SETRANGE')
  end
end

-- Notes that what is answered between two places in the reply has failed.
local function fail(from, to)
  failures = { from = from, to = to, err = trouble, before = failures }
end

-- Repeats the answer that ends at a place in the reply, of so many numbers: who was denied is denied until time goes on.
-- Returns where the last one ends.
local function repeat_last(to, numbers, times)
  for i = to + 1, to + numbers * times do
    reply[i] = reply[i - numbers]
  end
  return to + numbers * times
end

-- The strategies by their number, and what counts requests in flight by its own; those that are asked for are made below.
local strategies = {}
for i = 2, 1 + policy_count do
  strategies[byte(ARGV[i])] = true
end
