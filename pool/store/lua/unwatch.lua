-- unwatch: a node no longer waits for a job. Idempotent.
-- KEY job hash
-- ARG node str
-- FLAGS allow-oom
-- RETURN {"ok"} | {"gone"}
local nodes = redis.call('HGET', job, 'watch')
if not nodes then return {'gone'} end
local kept = {}
for name in string.gmatch(nodes, '%S+') do
  if name ~= node then kept[#kept + 1] = name end
end
redis.call('HSET', job, 'watch', table.concat(kept, ' '))
return {'ok'}
