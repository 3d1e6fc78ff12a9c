-- Sliding window of cells; the twin of src/limit/strategy/sliding_window.rs, which explains it.
--
-- Stored: a header, the time of the last charge and the sum of all that was granted before the first cell; then for each
-- cell, oldest first, when it ends and the sum of all that was granted up to it. Sums are kept without their upper bytes, so
-- only differences count.
-- Loaded: the sum of the cells within the period; the header and those cells as they are stored; when the newest of them
-- ends.
--
-- Uses decode and encode of call.lua; max, min, search, sub, try and write of prelude.lua.

local FORMAT, LENGTH = '<i7I5', 12
local FRESH = string.rep('\0', LENGTH)
-- Sums start again at this, which no two that are kept are apart.
local WRAP = 2 ^ 40

local function policy(capacity, period, _, width)
  return { capacity = capacity, period = period, width = width }
end

-- When the cell of a time ends.
local function cell_end(policy, time)
  return time - time % policy.width + policy.width
end

-- When the cell at a place ends, the first being 1, and the sum up to it. At 0 is the header.
local function cell(cells, place)
  return decode(FORMAT, cells, 1 + LENGTH * place)
end

-- The cells up to a place, with their header.
local function up_to(cells, place)
  return sub(cells, 1, LENGTH * (place + 1))
end

-- The cells after a place.
local function after(cells, place)
  return sub(cells, 1 + LENGTH * (place + 1))
end

local function load(policy, key, now, value)
  local count = value and #value / LENGTH - 1 or 0
  if count < 1 or count % 1 ~= 0 then
    return 0, FRESH, 0
  end
  local start, last, base = now - policy.period, cell(value, 0)
  local newest, total = cell(value, count)
  if newest <= start then
    return 0, FRESH, 0
  end
  local oldest = count > 1 and cell(value, 1) or newest
  if oldest <= start then
    local gone = search(1, count, function(place)
      return cell(value, place) > start
    end)
    oldest, base = cell(value, gone)
    oldest = cell(value, gone + 1)
    value, count = encode(FORMAT, last, base) .. after(value, gone), count - gone
  end
  local future = last > now
  if future then
    last = now
    value = encode(FORMAT, last, base) .. after(value, 0)
  end
  local sum, latest = (total - base) % WRAP, last + policy.period
  if sum == 0 then
    return 0, FRESH, 0
  elseif newest <= latest then
    return sum, value, newest, future
  end
  -- Of a longer period, since no cell of this one ends later, or of a clock that has gone back: what does is as if it had
  -- been charged by the last charge.
  local kept = 0
  newest = cell_end(policy, last)
  if oldest <= latest then
    kept = select(2, search(count, 1, function(place)
      return cell(value, place) <= latest
    end))
    newest = max(newest, (cell(value, kept)))
  end
  if newest <= start then
    return 0, FRESH, 0
  end
  return sum, up_to(value, kept) .. encode(FORMAT, newest, total), newest, future
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

-- How long until a cell that ends then counts no more. Cells that are not ours may end at any time.
local function leaves(policy, now, ends)
  return max(1, min(ends - now, policy.period) + policy.period)
end

local function wait(policy, key, now, cost, sum, cells, newest)
  -- The first cell that leaves room when it goes. If there is none it is the newest, where this same entry was charged.
  local over, count, _, base = sum + cost - policy.capacity, #cells / LENGTH - 1, cell(cells, 0)
  if count == 0 then
    return leaves(policy, now, newest)
  end
  local ends, total = cell(cells, 1)
  if (total - base) % WRAP < over then
    local _, place = search(1, count + 1, function(place)
      local _, total = cell(cells, place)
      return (total - base) % WRAP >= over
    end)
    ends = place > count and newest or cell(cells, place)
  end
  return leaves(policy, now, ends)
end

local function charge(policy, key, now, cost, sum, cells, newest)
  return sum + cost, cells, max(newest, cell_end(policy, now))
end

-- Of a charge that counts still, from the oldest cells first.
local function give_back(policy, key, now, cost, of, sum, cells, newest)
  if of.reset - of.age <= 0 then
    return 0, sum, cells, newest
  end
  if sum > cost then
    local last, base = cell(cells, 0)
    local gone = search(0, #cells / LENGTH - 1, function(place)
      local _, total = cell(cells, place)
      return (total - base) % WRAP > cost
    end)
    cells = encode(FORMAT, last, (base + cost) % WRAP) .. after(cells, gone)
  end
  return cost, max(0, sum - cost), cells, newest
end

local function reset(policy, now, sum, cells, newest)
  if sum == 0 then
    return 0
  end
  return leaves(policy, now, newest)
end

local function save(policy, key, now, at, cost, sum, cells, newest)
  if sum == 0 then
    try('DEL', key)
    return
  end
  if cost > 0 then
    -- To the last cell, unless that ends before the one of now.
    local count, _, base = #cells / LENGTH - 1, cell(cells, 0)
    if count > 0 and cell(cells, count) == newest then
      count = count - 1
    end
    cells = encode(FORMAT, now, base) .. after(up_to(cells, count), 0) .. encode(FORMAT, newest, base + sum)
  end
  write(key, cells, at)
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  give_back = give_back,
  reset = reset,
  save = save,
}
