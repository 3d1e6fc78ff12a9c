-- Sliding log; the twin of src/limit/strategy/sliding_log.rs, which explains it.
--
-- Stored: a list. First its index, then blocks of charges, about as many charges in each as there may be blocks. A block is
-- cells, one for each charge. The index is cells too, one for each block, with the time of its newest charge, and then the
-- place of each block in the list. In the place of a block that has left is an empty string, or what was there, until a new
-- one comes there. A block's sums say how its own charges differ, the index how the blocks do: who gives back what was
-- charged long ago rewrites a block and the index, and no check reads more than the index and a few blocks.
-- Loaded: the sum of the charges within the period; the log, or NONE: there is no list, or NOTHING: none of its charges
-- stays; the time of the newest charge, above `now` if the clock has gone back.
--   log.index, log.places  of the blocks that stay: the cells, and the places
--   log[place]             the block at a place, if it was read; an empty string if it has left
--   log.changed            the places of what must be written
--   log.foreign            whether there is something in a block's place that is not ours
--
-- Uses decode and encode of call.lua; after, cell, CELL, CELL_LENGTH, cells_in, expiry, good, max, min, redis_pcall, search,
-- sub, sum_to, take_out, trouble, try, up_to and WRAP of prelude.lua.

local PLACE, PLACE_LENGTH = '<I2', 2
local NONE, NOTHING = {}, {}

-- The reply to a read; nothing if there is no such key. One that holds something of another type is as good as none.
local function found(reply)
  if type(reply) == 'table' and reply.err then
    if sub(reply.err, 1, 9) ~= 'WRONGTYPE' then
      good(reply)
    end
    return nil
  end
  return reply
end

local function policy(capacity, period)
  return { capacity = capacity, period = period, block = math.ceil(2 * math.sqrt(capacity)) }
end

-- One charge, as a block or the cells of an index.
local function one(time, cost)
  return encode(CELL, 0, 0) .. encode(CELL, time, cost)
end

-- Where the block of a number is, the first being 1.
local function place_of(log, number)
  return (decode(PLACE, log.places, 1 + PLACE_LENGTH * (number - 1)))
end

-- The places up to that of a block, and after it.
local function places_to(log, number)
  return sub(log.places, 1, PLACE_LENGTH * number)
end
local function places_after(log, number)
  return sub(log.places, 1 + PLACE_LENGTH * number)
end

-- The block of a number, and its place. In the place of what is not ours, one that counts nothing.
local function block_of(key, log, number)
  local place = place_of(log, number)
  local block = log[place] or (try('LRANGE', key, place, place) or {})[1]
  if cells_in(block) == 0 then
    block, log.foreign = one(0, 0), true
  end
  log[place] = block
  return block, place
end

local function change(log, place, block)
  log[place], log.changed = block, log.changed or {}
  log.changed[place] = true
end

-- The place of the last cell before the first whose time a test is true of.
local function before(cells, test)
  return (search(0, cells_in(cells) + 1, function(place)
    return test((cell(cells, place)))
  end))
end

local function load(policy, key, now)
  local list = found(redis_pcall('LRANGE', key, '0', '1'))
  local index, first = list and list[1], list and list[2]
  local count = index and (#index - CELL_LENGTH) / (CELL_LENGTH + PLACE_LENGTH) or 0
  if not first or count < 1 or count % 1 > 0 then
    return 0, list and not index and NONE or NOTHING, now
  end
  local start = now - policy.period
  local newest, total = cell(index, count)
  if newest <= start then
    return 0, NOTHING, now
  end
  local log = { index = up_to(index, count), places = after(index, count) }
  local _, base = cell(index, 0)
  if cells_in(first) > 0 then
    log[1] = first
  end
  if cell(index, 1) <= start and count > 1 then
    local gone = search(1, count, function(place)
      return cell(index, place) > start
    end)
    for number = 1, gone do
      change(log, place_of(log, number), '')
    end
    _, base = cell(index, gone)
    log.index, log.places = encode(CELL, 0, base) .. after(log.index, gone), places_after(log, gone)
  end
  local block, place = block_of(key, log, 1)
  local oldest = cell(block, 1)
  if oldest <= start and cells_in(block) > 1 then
    local gone = search(1, cells_in(block), function(place)
      return cell(block, place) > start
    end)
    local _, left = cell(block, gone)
    base = base + sum_to(block, gone)
    log.index = encode(CELL, 0, base) .. after(log.index, 0)
    oldest = cell(block, gone + 1)
    change(log, place, encode(CELL, 0, left) .. after(block, gone))
  end
  local sum = (total - base) % WRAP
  if sum == 0 or oldest > now then
    -- Of a clock that has gone back: all is as if it had been charged now.
    return sum, NOTHING, newest, oldest > now
  end
  return sum, log, newest, newest > now
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

local function wait(policy, key, now, cost, sum, log, newest)
  -- The first charge that leaves room when it goes. If there is none, it is charged by this same entry.
  local over, index = sum + cost - policy.capacity, log.index
  local count = cells_in(index)
  if count == 0 then
    return policy.period
  end
  local gone, number = search(0, count + 1, function(place)
    return sum_to(index, place) >= over
  end)
  if number > count then
    return policy.period
  end
  local block = block_of(key, log, number)
  over = over - sum_to(index, gone)
  local _, place = search(0, cells_in(block), function(place)
    return sum_to(block, place) >= over
  end)
  -- A list that is not ours may hold any time.
  return max(1, policy.period - max(0, now - cell(block, place)))
end

local function charge(policy, key, now, cost, sum, log, newest)
  return sum + cost, log, max(newest, now)
end

-- Makes one block of this one and the next, if it is not too long.
local function join(policy, key, log, number)
  local count = cells_in(log.index)
  if number < 1 or number >= count then
    return
  end
  local block, place = block_of(key, log, number)
  local next_block, next_place = block_of(key, log, number + 1)
  if cells_in(block) + cells_in(next_block) > policy.block then
    return
  end
  local joined, _, total = { block }, cell(block, cells_in(block))
  for i = 1, cells_in(next_block) do
    joined[i + 1] = encode(CELL, (cell(next_block, i)), (total + sum_to(next_block, i)) % WRAP)
  end
  change(log, place, table.concat(joined))
  change(log, next_place, '')
  log.index = up_to(log.index, number - 1) .. after(log.index, number)
  log.places = places_to(log, number) .. places_after(log, number + 1)
end

-- Of a charge within the period: from the first that was made at its time or later.
local function give_back(policy, key, now, cost, of, sum, log, newest)
  local left, time = max(0, sum - cost), now - of.age
  if of.reset - of.age <= 0 then
    return 0, sum, log, newest
  elseif not log.index or left == 0 or newest > now then
    -- What is left of a clock that has gone back is as if it had been charged now.
    return cost, left, log.index and NOTHING or log, min(newest, now)
  end
  local function is_later(charged)
    return charged >= time
  end
  local index, count = log.index, cells_in(log.index)
  local number = before(index, is_later)
  local start = sum_to(index, number)
  if number < count then
    local block = block_of(key, log, number + 1)
    start = start + sum_to(block, before(block, is_later))
  end
  -- Of all units, those after the first so many go.
  start = min(start, left)
  local first = search(0, count + 1, function(place)
    return sum_to(index, place) > start
  end)
  local _, base = cell(index, 0)
  local kept, places, from = { up_to(index, first) }, { places_to(log, first) }, sum_to(index, first)
  for number = first + 1, count do
    local charged, place, to = cell(index, number), place_of(log, number), sum_to(index, number)
    local goes = min(start + cost, to) - max(start, from)
    if goes == to - from then
      change(log, place, '')
    else
      if goes > 0 then
        local block = take_out(block_of(key, log, number), max(start, from) - from, goes)
        charged = cell(block, cells_in(block))
        change(log, place, block)
      end
      places[#places + 1] = encode(PLACE, place)
      kept[#kept + 1] = encode(CELL, charged, (base + max(start, to - cost)) % WRAP)
    end
    from = to
  end
  log.index, log.places = table.concat(kept), table.concat(places)
  -- Or there would be many blocks of few charges.
  for number = first + 2, first, -1 do
    join(policy, key, log, number)
  end
  return cost, left, log, (cell(log.index, cells_in(log.index)))
end

local function reset(policy, now, sum, log, newest)
  if sum == 0 then
    return 0
  end
  return max(1, min(newest, now) + policy.period - now)
end

-- Adds a block of one charge, at the first place that no other has.
local function add(key, log, time, cost)
  local used, place = {}, 1
  for number = 1, cells_in(log.index) do
    used[place_of(log, number)] = true
  end
  while used[place] do
    place = place + 1
  end
  if (try('LRANGE', key, place, place) or {})[1] then
    change(log, place, one(time, cost))
  else
    try('RPUSH', key, one(time, cost))
  end
  log.places = log.places .. encode(PLACE, place)
end

-- Writes what has changed of a log, the index first: if that is refused, nothing has changed. Of many blocks that leave at
-- once some stay in the list. Returns whether anything was written.
local function store(key, log)
  if not try('LSET', key, '0', log.index .. log.places) then
    return false
  end
  local emptied = 0
  for place in pairs(log.changed or {}) do
    if log[place] ~= '' then
      try('LSET', key, place, log[place])
    elseif emptied < 10 then
      -- What is not ours may have named a place that there is not: nothing is lost.
      redis_pcall('LSET', key, place, '')
      emptied = emptied + 1
    end
  end
  return true
end

local function save(policy, key, now, at, cost, sum, log, newest)
  local function is_ahead(time)
    return time > now
  end
  -- The block that is written: the last one, or where a clock that has gone back finds charges ahead.
  local index, block, place = log.index
  local number = cells_in(index)
  if newest > now and number > 0 then
    number = before(index, is_ahead) + 1
  end
  if number > 0 then
    block, place = block_of(key, log, number)
  end
  if number == 0 or log.foreign or sum == 0 then
    -- A new list, of one charge of everything that counts.
    if log ~= NONE then
      try('DEL', key)
    end
    if sum == 0 then
      return
    end
    local time = min(newest, now)
    try('RPUSH', key, one(time, sum) .. encode(PLACE, 1), one(time, sum))
    if trouble then
      return
    end
  else
    local _, base = cell(index, 0)
    if newest > now then
      -- What was charged after now is one charge of now. Something was before, see `load`.
      local kept = before(block, is_ahead)
      local _, total = cell(block, kept)
      local ahead = sum - sum_to(index, number - 1) - sum_to(block, kept)
      change(log, place, up_to(block, kept) .. encode(CELL, now, (total + ahead) % WRAP))
      for later = number + 1, cells_in(index) do
        change(log, place_of(log, later), '')
      end
      log.index = up_to(index, number - 1) .. encode(CELL, now, (base + sum) % WRAP)
      log.places = places_to(log, number)
    elseif cost > 0 then
      local length = cells_in(block)
      if length < policy.block then
        local _, total = cell(block, length)
        change(log, place, block .. encode(CELL, now, (total + cost) % WRAP))
        number = number - 1
      else
        add(key, log, now, cost)
        if trouble then
          return
        end
      end
      log.index = up_to(index, number) .. encode(CELL, now, (base + sum) % WRAP)
    end
    if not store(key, log) then
      return
    end
  end
  if not trouble then
    try('PEXPIREAT', key, expiry(at))
  end
  if trouble then
    -- A list that is half written, or would stay for ever.
    try('DEL', key)
  end
end

return {
  reads = false,
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  give_back = give_back,
  reset = reset,
  save = save,
}
