-- Sliding window of cells; the twin of src/limit/strategy/sliding_window.rs, which explains it.
--
-- Stored: the sum of the cells, then for each cell, oldest first, when it ends and what was granted in it.
-- Loaded: the sum of the cells within the period, and those cells as they are stored.

local SUM, CELL, HEADER, LENGTH = '<I6', '<i7I5', 6, 12

local function policy(capacity, period, width)
  return { capacity = capacity, period = period, width = width }
end

-- When the cell of now ends.
local function cell_end(policy, now)
  return now - now % policy.width + policy.width
end

local function load(policy, key, now, value)
  if not value or #value < HEADER + LENGTH or (#value - HEADER) % LENGTH ~= 0 then
    return 0, ''
  end
  local sum, at = unpack(SUM, value), HEADER + 1
  while at < #value do
    local ends, count = unpack(CELL, value, at)
    if ends > now - policy.period then
      break
    end
    sum, at = sum - count, at + LENGTH
  end
  sum = max(0, min(sum, 2 * policy.capacity))
  local last = unpack(CELL, value, #value - LENGTH + 1)
  if sum == 0 or last <= now - policy.period then
    return 0, ''
  elseif last > cell_end(policy, now) then
    -- Of a clock that has gone back, or of wider cells: as if all had been charged now.
    return sum, pack(CELL, cell_end(policy, now), sum), nil, true
  end
  return sum, sub(value, at)
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

-- How long until a cell that ends then counts no more. Cells that are not ours may end at any time.
local function leaves(policy, now, ends)
  return max(1, min(ends, cell_end(policy, now)) + policy.period - now)
end

local function wait(policy, key, now, cost, sum, cells)
  local over, ends = sum + cost - policy.capacity, 0
  for at = 1, #cells, LENGTH do
    local count
    ends, count = unpack(CELL, cells, at)
    over = over - count
    if over <= 0 then
      break
    end
  end
  return leaves(policy, now, ends)
end

-- The cells without their last, and what that is.
local function pop(cells)
  local ends, count = unpack(CELL, cells, #cells - LENGTH + 1)
  return sub(cells, 1, #cells - LENGTH), ends, count
end

-- Gives back from the newest cells first.
local function charge(policy, key, now, cost, sum, cells)
  sum = max(0, sum + cost)
  if cost > 0 then
    local before, ends, count = '', 0, 0
    if #cells > 0 then
      before, ends, count = pop(cells)
    end
    if ends == cell_end(policy, now) then
      return sum, before .. pack(CELL, ends, count + cost)
    end
    return sum, cells .. pack(CELL, cell_end(policy, now), cost)
  end
  while cost < 0 and #cells > 0 do
    local before, ends, count = pop(cells)
    cells = before
    if count + cost > 0 then
      cells = before .. pack(CELL, ends, count + cost)
    end
    cost = min(0, count + cost)
  end
  -- Cells that are not ours may be less than their sum.
  return #cells > 0 and sum or 0, cells
end

local function reset(policy, now, sum, cells)
  if sum == 0 then
    return 0
  end
  return leaves(policy, now, (unpack(CELL, cells, #cells - LENGTH + 1)))
end

local function save(policy, key, now, at, cost, sum, cells)
  if sum == 0 then
    try('DEL', key)
    return
  end
  write(key, pack(SUM, sum) .. cells, at)
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
