-- Sliding window of cells; the twin of src/limit/strategy/sliding_window.rs, which explains it.
--
-- Stored: the sum of all that was granted before the first cell; then for each cell, oldest first, when it ends and the
-- sum of all that was granted up to it. Sums are kept without their upper bytes, so only differences count.
-- Loaded: the sum of the cells within the period; those cells as they are stored; when the newest of them ends.

local SUM, CELL, HEADER, LENGTH, FRESH = '<I5', '<i7I5', 5, 12, '\0\0\0\0\0'
-- Sums start again at this, which no two that are kept are apart.
local WRAP = 2 ^ 40

local function policy(capacity, period, width)
  return { capacity = capacity, period = period, width = width }
end

-- When the cell of now ends.
local function cell_end(policy, now)
  return now - now % policy.width + policy.width
end

-- When the cell at a place ends, the first being 1; and the sum up to it.
local function cell(cells, place)
  return unpack(CELL, cells, HEADER + 1 + LENGTH * (place - 1))
end

local function load(policy, key, now, value)
  local last = value and (#value - HEADER) / LENGTH or 0
  if last < 1 or last % 1 ~= 0 then
    return 0, FRESH, 0
  end
  local period, base = policy.period, unpack(SUM, value)
  local newest, total = cell(value, last)
  if newest <= now - period then
    return 0, FRESH, 0
  end
  local oldest = last > 1 and cell(value, 1) or newest
  if oldest <= now - period then
    local gone = search(1, last, function(place)
      return cell(value, place) > now - period
    end)
    oldest, base = cell(value, gone)
    oldest = cell(value, gone + 1)
    value, last = pack(SUM, base) .. sub(value, HEADER + 1 + LENGTH * gone), last - gone
  end
  local sum = (total - base) % WRAP
  if sum == 0 then
    return 0, FRESH, 0
  elseif newest <= now + period then
    return sum, value, newest
  end
  -- Of a clock that has gone back, or of a longer period, since no cell of this one ends later: what does is as if it
  -- had been charged now.
  local kept = 0
  newest = cell_end(policy, now)
  if oldest <= now + period then
    kept = select(2, search(last, 1, function(place)
      return cell(value, place) <= now + period
    end))
    newest = max(newest, (cell(value, kept)))
  end
  return sum, sub(value, 1, HEADER + LENGTH * kept) .. pack(CELL, newest, total), newest, true
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
  local over, last, base = sum + cost - policy.capacity, (#cells - HEADER) / LENGTH, unpack(SUM, cells)
  if last == 0 then
    return leaves(policy, now, newest)
  end
  local ends, total = cell(cells, 1)
  if (total - base) % WRAP < over then
    local _, place = search(1, last + 1, function(place)
      local _, total = cell(cells, place)
      return (total - base) % WRAP >= over
    end)
    ends = place > last and newest or cell(cells, place)
  end
  return leaves(policy, now, ends)
end

local function charge(policy, key, now, cost, sum, cells, newest)
  sum = max(0, sum + cost)
  if cost > 0 then
    return sum, cells, max(newest, cell_end(policy, now))
  elseif sum == 0 then
    return 0, cells, newest
  end
  -- Gives back from the newest cells first, until so much is left.
  local base = unpack(SUM, cells)
  local cut, kept = search((#cells - HEADER) / LENGTH, 0, function(place)
    local _, total = cell(cells, place)
    return (total - base) % WRAP <= sum
  end)
  local total, rest, ends = base, '', cell(cells, cut)
  if kept > 0 then
    newest, total = cell(cells, kept)
  end
  if (total - base) % WRAP < sum then
    newest, rest = ends, pack(CELL, ends, base + sum)
  end
  return sum, sub(cells, 1, HEADER + LENGTH * kept) .. rest, newest
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
    local last, base = (#cells - HEADER) / LENGTH, unpack(SUM, cells)
    if last > 0 and cell(cells, last) == newest then
      last = last - 1
    end
    cells = sub(cells, 1, HEADER + LENGTH * last) .. pack(CELL, newest, base + sum)
  end
  write(key, cells, at)
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  reset = reset,
  save = save,
}
