-- What an unload does to the jobs of its model.
local UNLOADED = {'error_code', 'model_unloading', 'error_message', 'Its model was unloaded.'}

-- The reply where a job of this state is not to be ended: the model is not being unloaded, or it may still end by itself.
-- One that has begun is its worker's until `late` ms after the time to drain.
local function stays(model, state, late, at_ms)
  local seen = redis.call('HMGET', model, 'phase', 'until_ms')
  if seen[1] ~= 'unloading' then return {'kept'} end
  if state == 'running' and at_ms < tonumber(seen[2]) + late then return {'busy'} end
end
