-- Sliding log. The Rust half, src/limit/strategy/sliding_log.rs, explains the algorithm.
--
-- Stored: up to LOOSE charges are one string of cells. A longer log is a list: a head, then blocks, oldest
-- first; each block is a string of cells. So most checks read and write only the head. It has
--   the number of charges at the front;
--   the number of blocks;
--   the number of cells to skip in the first block, because they have left the period or are at the front;
--   cells: the charges at the front, one cell per block (the time of its newest charge, and the running sum
--   up to it), and the newest charges. Their header has the time of the first charge in the blocks, or an
--   earlier time.
-- The sums in a block give the differences between its charges; the sums in the head give the differences
-- between blocks. So a refund of an old charge rewrites one block and the head.
--
-- State: the sum of the charges within the period; the log, or nil if it is empty; the time of the newest
-- charge, above `now` if the clock was set back.
--   log.raw      the string or the head as read, if nothing in it has changed; its cells start at `at`
--   log.cells    the cells within the period, if they were needed: see `cells_of`
--   log.base     the running sum before the cells
--   log.front    the number of cells before the blocks' cells
--   log.blocks   the number of blocks' cells
--   log.first    the place in the list before the first of these blocks
--   log.cut      the number of cells to skip in the first block
--   log.length   the number of blocks in the list
--   log.places   the place of each block in the list; nil if the places are consecutive
--   log[place]   the block at a place, if it was read
--   log.changed  the places of blocks that must be written; a dropped block is an empty string
--   log.new      a block that must be appended
--   log.foreign  whether the list has an invalid block, which another program has written
--
-- Uses decode, encode, max, min, redis_pcall, sub and WRAP of call.lua; CELL, CELL_LENGTH, cell_functions,
-- expiry, record_error, first_error, try and write of prelude.lua.

local search, cells_in, cell, sum_to, up_to, after, take_out = cell_functions()
local LOOSE, FRONT = 32, 16
local HEAD, HEAD_LENGTH = '<I2I2I2', 6

local function policy(capacity, period)
  return { capacity = capacity, period = period, block = LOOSE + math.ceil(2 * math.sqrt(capacity)) }
end

-- Returns the head of a list, or nil if there is no list.
local function head_of(key)
  local list = redis_pcall('LRANGE', key, '0', '0')
  if list.err then
    -- A value of another type counts as no list.
    if sub(list.err, 1, 9) ~= 'WRONGTYPE' then
      record_error(list, 'LRANGE')
    end
    return nil
  end
  return list[1]
end

-- Returns the cells of a single charge.
local function one(time, cost)
  return encode(CELL, time, 0) .. encode(CELL, time, cost)
end

-- Returns the number of the block that a cell represents, counted from 1; nil if the cell is a
-- charge.
local function number_of(log, place)
  local number = place - log.front
  return number >= 1 and number <= log.blocks and number or nil
end

local function place_of(log, number)
  return log.places and log.places[number] or log.first + number
end

-- Returns the cells of a log. Copies them from the head only if needed, since each new Lua string
-- costs garbage collection.
local function cells_of(log)
  log.cells = log.cells or sub(log.raw, log.at)
  return log.cells
end

local function set_cells(log, cells)
  log.raw, log.cells = nil, cells
end

-- Returns the stored block with this number, counted from 1. Instead of an invalid block, uses a
-- charge of 0 and marks the log as foreign, so that `save` replaces the list.
local function stored(key, log, number)
  local place = place_of(log, number)
  local block = log[place] or (try('LRANGE', key, place, place) or {})[1]
  if cells_in(block) == 0 or number == 1 and cells_in(block) <= log.cut then
    block, log.cut, log.foreign = one(0, 0), 0, true
  end
  log[place] = block
  return block
end

-- Returns a block; the first one without the `log.cut` cells to skip.
local function block_of(key, log, number)
  local block = stored(key, log, number)
  return number == 1 and sub(block, 1 + CELL_LENGTH * log.cut) or block
end

-- Replaces a block, and marks it as changed.
local function change(log, number, block)
  local place = place_of(log, number)
  log.changed = log.changed or {}
  log[place], log.changed[place] = block, true
  if number == 1 then
    log.cut = 0
  end
end

local function drop(log, number)
  if not log.places then
    log.places = {}
    for i = 1, log.blocks do
      log.places[i] = log.first + i
    end
  end
  change(log, number, '')
  table.remove(log.places, number)
  log.blocks = log.blocks - 1
end

-- Returns the last place before the first cell whose time satisfies `test`.
local function before(cells, test)
  return (search(0, cells_in(cells) + 1, function(place)
    return test((cell(cells, place)))
  end))
end

-- Returns the last place up to which the sum is below `sum`, and the next place.
local function below(cells, sum)
  return search(0, cells_in(cells) + 1, function(place)
    return sum_to(cells, place) >= sum
  end)
end

-- Drops the charges that have left the period, which starts at `start`.
local function leave(key, log, start, count)
  local function in_raw(place)
    return decode(CELL, log.raw, log.at + CELL_LENGTH * place)
  end
  local gone = search(0, count, function(place)
    return in_raw(place) > start
  end)
  local _, base = in_raw(gone)
  local rest = log.at + CELL_LENGTH * gone
  if gone > log.front then
    log.first = min(gone - log.front, log.blocks)
    log.blocks, log.cut = log.blocks - log.first, log.first == 0 and log.cut or 0
  end
  log.front = max(0, log.front - gone)
  if log.blocks == 0 or log.front > 0 then
    set_cells(log, sub(log.raw, rest))
  else
    -- Move the first charges of the first block to the front, so that the next checks need not read
    -- the block.
    local block = stored(key, log, 1)
    local count, cut = cells_in(block), log.cut
    cut = search(cut, count, function(place)
      return cell(block, place) > start
    end)
    local _, to = in_raw(gone + 1)
    local _, left = cell(block, cut)
    local _, total = cell(block, count)
    -- The block's running sums may differ from the head's.
    base = (to - total + left) % WRAP
    log.front = min(FRONT, count - cut - 1)
    log.cut = cut + log.front
    local all = { encode(CELL, cell(block, log.cut + 1), base) }
    for place = cut + 1, log.cut do
      local time, sum = cell(block, place)
      all[#all + 1] = encode(CELL, time, (base + sum - left) % WRAP)
    end
    all[#all + 1] = sub(log.raw, rest + CELL_LENGTH)
    set_cells(log, table.concat(all))
  end
  log.base = base
end

local function load(policy, key, now, value)
  local raw, at, front, blocks, cut = value, 1, 0, 0, 0
  if not raw then
    raw = head_of(key)
    if not raw or #raw < HEAD_LENGTH then
      return 0, nil, now
    end
    at, front, blocks, cut = 1 + HEAD_LENGTH, decode(HEAD, raw)
  end
  local count = (#raw + 1 - at) / CELL_LENGTH - 1
  if count < max(1, front + blocks) or count % 1 > 0 then
    return 0, nil, now
  end
  local start, newest, total = now - policy.period, decode(CELL, raw, at + CELL_LENGTH * count)
  if newest <= start then
    return 0, nil, now
  end
  local oldest, base = decode(CELL, raw, at)
  if front > 0 or blocks == 0 then
    oldest = decode(CELL, raw, at + CELL_LENGTH)
  end
  local log = { raw = raw, at = at, base = base, front = front, blocks = blocks, first = 0, cut = cut, length = blocks }
  if oldest <= start then
    leave(key, log, start, count)
  end
  return (total - log.base) % WRAP, log, newest, newest > now
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

local function wait(policy, key, now, cost, sum, log)
  -- The first charge whose expiry frees enough room. If it is not stored yet, this same entry
  -- charges it.
  local over, cells = sum + cost - policy.capacity, log and cells_of(log) or ''
  local gone, place = below(cells, over)
  if place > cells_in(cells) then
    return policy.period
  end
  local number = number_of(log, place)
  if number then
    over, cells = over - sum_to(cells, gone), block_of(key, log, number)
    place = min(select(2, below(cells, over)), cells_in(cells))
  end
  -- Data written by another program may have any time.
  return max(1, policy.period - max(0, now - cell(cells, place)))
end

local function charge(policy, key, now, cost, sum, log, newest)
  return sum + cost, log, max(newest, now)
end

-- Joins two blocks.
local function joined(block, next_block)
  local all, _, total = { block }, cell(block, cells_in(block))
  if select(2, cell(next_block, 0)) == total then
    return block .. after(next_block, 0)
  end
  for i = 1, cells_in(next_block) do
    all[i + 1] = encode(CELL, (cell(next_block, i)), (total + sum_to(next_block, i)) % WRAP)
  end
  return table.concat(all)
end

-- Joins a block with the next one, if the result is not too long.
local function join(policy, key, log, number)
  if number < 1 or number >= log.blocks then
    return
  end
  local block, next_block = block_of(key, log, number), block_of(key, log, number + 1)
  if cells_in(block) + cells_in(next_block) <= policy.block then
    change(log, number, joined(block, next_block))
    drop(log, number + 1)
    number = log.front + number
    set_cells(log, up_to(log.cells, number - 1) .. after(log.cells, number))
  end
end

-- Refunds a charge within the period, starting with the first charge at its time or later.
local function refund(policy, key, now, cost, of, sum, log, newest)
  local refunded, time = min(cost, sum), now - of.age
  local left = sum - refunded
  if of.reset - of.age <= 0 then
    return 0, sum, log, newest
  elseif not log or left == 0 or newest > now then
    -- The clock was set back: the remaining charges count as if made now.
    return refunded, left, nil, min(newest, now)
  end
  local function is_later(charged)
    return charged >= time
  end
  local cells, front, last = cells_of(log), log.front, log.front + log.blocks
  local place = before(cells, is_later)
  local start, number = sum_to(cells, place), number_of(log, place + 1)
  if number then
    local block = block_of(key, log, number)
    start = start + sum_to(block, before(block, is_later))
  end
  -- Remove `cost` units after the first `start` units, or the last `cost` units if fewer follow.
  start = min(start, left)
  local first = below(cells, start + 1)
  if first >= last then
    set_cells(log, take_out(cells, start, cost))
  else
    local base, kept, from = log.base, { up_to(cells, first) }, sum_to(cells, first)
    local stay = max(0, first - front)
    local before_first = stay
    for place = first + 1, cells_in(cells) do
      local charged, to = cell(cells, place)
      local is_block = place > front and place <= last
      to = (to - base) % WRAP
      local goes = min(start + cost, to) - max(start, from)
      if goes < to - from then
        stay = stay + (is_block and 1 or 0)
        if goes > 0 and is_block then
          local block = take_out(block_of(key, log, stay), max(start, from) - from, goes)
          charged = cell(block, cells_in(block))
          change(log, stay, block)
        end
        kept[#kept + 1] = encode(CELL, charged, (base + max(start, to - cost)) % WRAP)
      elseif is_block then
        drop(log, stay + 1)
      elseif place <= front then
        log.front = log.front - 1
      end
      from = to
    end
    set_cells(log, table.concat(kept))
    -- Keep the number of blocks small: join neighbors that have become short.
    for number = before_first + 2, before_first, -1 do
      join(policy, key, log, number)
    end
  end
  return refunded, left, log, (cell(log.cells, cells_in(log.cells)))
end

local function reset(policy, now, sum, log, newest)
  if sum == 0 then
    return 0
  end
  return max(1, min(newest, now) + policy.period - now)
end

-- Merges the charges later than `now` into one charge at `now`, with the running sum `total`.
local function merge(key, log, now, total)
  local function is_ahead(time)
    return time > now
  end
  local cells = cells_of(log)
  local kept = before(cells, is_ahead)
  local last, number, stay = '', number_of(log, kept + 1), 0
  if number then
    local block = block_of(key, log, number)
    stay = before(block, is_ahead)
    if stay > 0 then
      local _, to = cell(cells, kept + 1)
      local ahead = sum_to(block, cells_in(block)) - sum_to(block, stay)
      change(log, number, up_to(block, stay))
      last = encode(CELL, cell(block, stay), (to - ahead) % WRAP)
    end
  end
  log.front = min(log.front, kept)
  for number = log.blocks, kept - log.front + (stay > 0 and 2 or 1), -1 do
    drop(log, number)
  end
  set_cells(log, up_to(cells, kept) .. last .. encode(CELL, now, total))
end

-- Returns whether a key that this call deletes can be recreated in the same call. While a cluster
-- migrates a slot away, its node rejects reads of missing keys of the slot, and creates no keys.
local function can_replace(key)
  local reply = redis_pcall('MGET', key .. ':')
  return not (reply.err and string.find(reply.err, 'non local key', 1, true))
end

-- Packs the charges after the blocks, except the newest, into a new block, or into the last block
-- if they fit.
local function pack(policy, key, log)
  local cells, blocks = cells_of(log), log.blocks
  local ahead, count = log.front + blocks, cells_in(cells)
  local block, rest = sub(cells, 1 + CELL_LENGTH * ahead, CELL_LENGTH * count), after(cells, count - 2)
  if blocks == 0 then
    ahead, log.front = 0, 0
    block, cells = sub(cells, 1, CELL_LENGTH * count), encode(CELL, cell(cells, 1), log.base)
  end
  local last = blocks > 0 and block_of(key, log, blocks)
  if last and cells_in(last) + cells_in(block) <= policy.block then
    change(log, blocks, joined(last, block))
    ahead = ahead - 1
  else
    log.new, log.blocks = block, blocks + 1
  end
  set_cells(log, up_to(cells, ahead) .. rest)
end

-- Writes an element of the list. Returns whether that element exists.
local function set(key, place, value)
  local reply = redis_pcall('LSET', key, place, value)
  if reply.err and not string.find(reply.err, 'out of range', 1, true) then
    record_error(reply, 'LSET')
  end
  return not reply.err
end

-- Writes a list with an added charge. Returns `false` if the list has no element for the head.
local function write_list(key, log, added)
  local count = log.blocks - (log.new and 1 or 0)
  local head = log.raw and log.raw .. added or encode(HEAD, log.front, log.blocks, log.cut) .. log.cells .. added
  if count == 0 then
    return try('DEL', key) and try('RPUSH', key, head, log.new)
  end
  -- Elements before the first block and after the last one have left the period.
  local first, last = place_of(log, 1) - 1, place_of(log, count)
  if not set(key, first, head) then
    return false
  end
  if first > 0 or last < log.length then
    try('LTRIM', key, first, last)
  end
  local dropped = false
  for place in pairs(log.changed or {}) do
    if place > first and place < last or log[place] ~= '' then
      set(key, place - first, log[place])
      dropped = dropped or log[place] == ''
    end
  end
  if dropped then
    try('LREM', key, '0', '')
  end
  if log.new then
    try('RPUSH', key, log.new)
  end
  return true
end

local function save(policy, key, now, at, cost, sum, log, newest)
  if sum == 0 then
    try('DEL', key)
    return
  end
  if log then
    local added, total = '', (log.base + sum) % WRAP
    if newest > now then
      merge(key, log, now, total)
    elseif cost > 0 then
      added = encode(CELL, now, total)
      local is_long = #(log.raw or log.cells) >= CELL_LENGTH * (log.front + log.blocks + LOOSE + 1)
      if is_long and (log.blocks > 0 or can_replace(key)) then
        set_cells(log, cells_of(log) .. added)
        added = ''
        pack(policy, key, log)
      end
    end
    if log.blocks == 0 then
      write(key, cells_of(log) .. added, expiry(at))
      return
    elseif not log.foreign and write_list(key, log, added) and try('PEXPIREAT', key, expiry(at)) then
      return
    end
  end
  -- Store a single charge with the whole sum, if the list was damaged. If a command has failed, so that the list is partly
  -- written or would never expire, the sum is the former one.
  write(key, one(min(newest, now), first_error and sum - cost or sum), expiry(at))
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
  has_lists = true,
}
