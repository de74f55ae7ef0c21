-- Which flow a feed serves next (lib/looking.lua).

-- The flow of a lane that is served next, nil for none; `borrow`: whether one may hold more than its cap.
local function next_of(f, lane, borrow)
  local passed
  while true do
    local best
    for _, flow in ipairs(f.list[lane]) do
      local is_less = not best or flow.vt < best.vt or flow.vt == best.vt and flow.name < best.name
      if is_less and not (passed and passed[flow]) then best = flow end
    end
    if not best then return nil end
    if not best.turns then step_on(f, best) end
    if best.front and (borrow or best.cap == 0 or f.busy[best.key] + best.n <= best.cap) then return best end
    passed = passed or {}
    passed[best] = true
  end
end

-- The flow to serve: of a lower lane that is owed what its job is taken to need, else of the highest. Second, whether it
-- was owed.
local function next_flow(f, borrow)
  local first
  for lane = 0, LANES - 1 do
    local flow = f.list[lane][1] and next_of(f, lane, borrow)
    if flow and first and f.owed[lane] >= flow.cost then return flow, true end
    first = first or flow
  end
  return first, false
end
