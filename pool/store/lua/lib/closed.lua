-- Why a model takes no job now: unloading, unloaded or failed; nil where it takes them. Behind it, whether it is to be
-- loaded again by itself.
local function closed(model)
  local seen = redis.call('HMGET', model, 'wanted', 'phase', 'next', 'failed')
  if seen[1] == 'unloaded' then return seen[2] == 'unloaded' and 'unloaded' or 'unloading', seen[3] and 1 or 0 end
  if seen[4] then return 'failed', 0 end
end
