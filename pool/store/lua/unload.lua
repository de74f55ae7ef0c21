-- unload: a model takes no more jobs from now on, and is to be unloaded. Repeated, the earlier end of the time to drain
-- counts.
-- KEY model hash
-- ARG drain ms that what runs may take
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", change} | {"same", change}: it is so already
local at_ms = now_ms()
local seen = redis.call('HMGET', model, 'wanted', 'phase', 'change', 'until_ms')
local change = tonumber(seen[3] or 0)
if seen[1] == 'unloaded' then
  local loaded_next = redis.call('HDEL', model, 'next') == 1
  if seen[2] == 'unloading' and at_ms + drain < tonumber(seen[4]) then redis.call('HSET', model, 'until_ms', at_ms + drain) end
  return {loaded_next and 'ok' or 'same', change}
end
redis.call('HSET', model, 'wanted', 'unloaded', 'phase', 'unloading', 'change', change + 1, 'since_ms', at_ms, 'until_ms',
  at_ms + drain)
redis.call('HDEL', model, 'failed')
return {'ok', change + 1}
