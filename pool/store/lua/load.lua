-- load: a model is to be loaded; while it is being unloaded, as soon as that is over.
-- KEY model hash
-- ARG again flag 1: where a rank of it failed, those that have not loaded it try again
-- INCLUDE clock
-- RETURN {"ok", change} | {"later", change} once it is unloaded | {"same", change}: that was asked for already
local seen = redis.call('HMGET', model, 'wanted', 'phase', 'change', 'failed')
local change = tonumber(seen[3] or 0)
if seen[1] == 'unloaded' and seen[2] ~= 'unloaded' then
  return {redis.call('HSETNX', model, 'next', 'loaded') == 1 and 'later' or 'same', change}
end
if seen[1] == 'loaded' and not seen[4] and again == 0 then return {'same', change} end
redis.call('HSET', model, 'wanted', 'loaded', 'change', change + 1, 'since_ms', now_ms())
redis.call('HDEL', model, 'phase', 'failed', 'until_ms')
return {'ok', change + 1}
